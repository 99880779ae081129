"""Qwen3 (dense): Llama with an RMS norm on every query and key head, and a head size of its own.

Built on the worker thread. Facts: the Qwen3 report (arXiv:2505.09388) and config.json.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from infer.config.model import ModelConfig
from infer.layers.attention import AttentionFacts, SelfAttention
from infer.layers.decoder import Decoder, DecoderBlock
from infer.layers.embedding import Embedding
from infer.layers.facts import Facts
from infer.layers.linear import LMHead
from infer.layers.mlp import MLP
from infer.layers.norm import RMSNorm
from infer.layers.rotary import RopeFacts, Rotary
from infer.plugins.hookspecs import hookimpl
from infer.plugins.model import API_VERSION, GGUFNames, ModelSpec
from infer.weights.mapping import decoder_table

if TYPE_CHECKING:
    from infer.plugins.model import BuildContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Config:
    """What the architecture needs from config.json."""

    vocab_size: int
    intermediate_size: int
    eps: float
    tied: bool
    attention_bias: bool
    attention: tuple[AttentionFacts, ...]
    """One per layer."""
    rope: RopeFacts


def config_view(config: ModelConfig) -> Qwen3Config:
    facts = Facts(config)
    facts.must_be("hidden_act", "silu")
    num_heads, num_kv_heads, head_size = facts.heads(kv_default=32, size_default=128)
    num_layers = facts.integer("num_hidden_layers")
    window = facts.integer("sliding_window", 4096) if facts.flag("use_sliding_window", False) else None
    first = facts.integer("max_window_layers", 28, minimum=0)
    windows = facts.windows(num_layers, window, [window is not None and i >= first for i in range(num_layers)])
    return Qwen3Config(
        vocab_size=config.vocab_size,
        intermediate_size=facts.integer("intermediate_size"),
        eps=facts.number("rms_norm_eps", 1e-6),
        tied=facts.flag("tie_word_embeddings", False),
        attention_bias=facts.flag("attention_bias", False),
        attention=tuple(
            AttentionFacts(
                hidden_size=facts.integer("hidden_size"),
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_size=head_size,
                scale=head_size**-0.5,
                window=window,
            )
            for window in windows
        ),
        rope=facts.rope(theta=10000.0),
    )


def factory(config: ModelConfig, context: BuildContext) -> Decoder:
    view = config_view(config)
    facts = view.attention[0]
    hidden, eps = facts.hidden_size, view.eps
    embedding = Embedding(context, view.vocab_size, hidden)
    return Decoder(
        embedding=embedding,
        blocks=[
            DecoderBlock(
                SelfAttention(
                    context,
                    i,
                    layer,
                    qkv_bias=view.attention_bias,
                    out_bias=view.attention_bias,
                    qk_norm=(RMSNorm(context, facts.head_size, eps), RMSNorm(context, facts.head_size, eps)),
                ),
                MLP(context, hidden, view.intermediate_size),
                RMSNorm(context, hidden, eps),
                RMSNorm(context, hidden, eps),
            )
            for i, layer in enumerate(view.attention)
        ],
        norm=RMSNorm(context, hidden, eps),
        head=LMHead(context, view.vocab_size, hidden, tied_to=embedding if view.tied else None),
        rotaries=[Rotary(context, view.rope, facts.head_size)],
        table=decoder_table(
            num_layers=len(view.attention),
            q_rows=facts.q_rows,
            kv_rows=facts.kv_rows,
            intermediate_size=view.intermediate_size,
            tied=view.tied,
            norms={
                "input_layernorm": "input_norm",
                "post_attention_layernorm": "post_norm",
                "self_attn.q_norm": "attention.q_norm",
                "self_attn.k_norm": "attention.k_norm",
            },
            qkv_bias=view.attention_bias,
            out_bias=view.attention_bias,
        ),
    )


GGUF = GGUFNames(
    arch="qwen3",
    architecture="Qwen3ForCausalLM",
    config_keys={
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "head_dim": "attention.key_length",
        "rms_norm_eps": "attention.layer_norm_rms_epsilon",
        "max_position_embeddings": "context_length",
        "vocab_size": "vocab_size",
        "rope_theta": "rope.freq_base",
    },
    tensors={
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
        "blk.{i}.attn_norm.weight": "model.layers.{i}.input_layernorm.weight",
        "blk.{i}.attn_q.weight": "model.layers.{i}.self_attn.q_proj.weight",
        "blk.{i}.attn_k.weight": "model.layers.{i}.self_attn.k_proj.weight",
        "blk.{i}.attn_q_norm.weight": "model.layers.{i}.self_attn.q_norm.weight",
        "blk.{i}.attn_k_norm.weight": "model.layers.{i}.self_attn.k_norm.weight",
        "blk.{i}.attn_v.weight": "model.layers.{i}.self_attn.v_proj.weight",
        "blk.{i}.attn_output.weight": "model.layers.{i}.self_attn.o_proj.weight",
        "blk.{i}.ffn_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
        "blk.{i}.ffn_gate.weight": "model.layers.{i}.mlp.gate_proj.weight",
        "blk.{i}.ffn_up.weight": "model.layers.{i}.mlp.up_proj.weight",
        "blk.{i}.ffn_down.weight": "model.layers.{i}.mlp.down_proj.weight",
    },
)

EXAMPLE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@hookimpl
def infer_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="qwen3",
            api=API_VERSION,
            factory=f"{__name__}:factory",
            architectures=("Qwen3ForCausalLM",),
            config_view=f"{__name__}:config_view",
            gguf=GGUF,
            example=EXAMPLE,
        )
    ]
