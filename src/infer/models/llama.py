"""Llama 2 and 3, SmolLM2 and everything that calls itself LlamaForCausalLM; Mistral, which adds a sliding window.

Built on the worker thread. Facts: the Llama 2 (arXiv:2307.09288) and Mistral 7B (arXiv:2310.06825) papers, config.json.
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
class LlamaConfig:
    """What the architecture needs from config.json."""

    vocab_size: int
    num_layers: int
    intermediate_size: int
    eps: float
    tied: bool
    mlp_bias: bool
    attention_bias: bool
    attention: AttentionFacts
    rope: RopeFacts


def config_view(config: ModelConfig) -> LlamaConfig:
    facts = Facts(config)
    facts.must_be("hidden_act", "silu", "swish")
    mistral = config.architecture == "MistralForCausalLM"
    num_heads, num_kv_heads, head_size = facts.heads(kv_default=8 if mistral else None)
    window = None
    # Llama configs may carry a stray sliding_window; only Mistral means it, and means 4096 when it is silent.
    if mistral and config.raw.get("sliding_window", 4096) is not None:
        window = facts.integer("sliding_window", 4096)
    return LlamaConfig(
        vocab_size=config.vocab_size,
        num_layers=facts.integer("num_hidden_layers"),
        intermediate_size=facts.integer("intermediate_size"),
        eps=facts.number("rms_norm_eps", 1e-6),
        tied=facts.flag("tie_word_embeddings", False),
        mlp_bias=not mistral and facts.flag("mlp_bias", False),
        attention_bias=not mistral and facts.flag("attention_bias", False),
        attention=AttentionFacts(
            hidden_size=facts.integer("hidden_size"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            scale=head_size**-0.5,
            window=window,
        ),
        rope=facts.rope(theta=10000.0),
    )


def factory(config: ModelConfig, context: BuildContext) -> Decoder:
    view = config_view(config)
    facts = view.attention
    hidden, eps = facts.hidden_size, view.eps
    embedding = Embedding(context, view.vocab_size, hidden)
    table = decoder_table(
        num_layers=view.num_layers,
        q_rows=facts.q_rows,
        kv_rows=facts.kv_rows,
        intermediate_size=view.intermediate_size,
        tied=view.tied,
        norms={"input_layernorm": "input_norm", "post_attention_layernorm": "post_norm"},
        qkv_bias=view.attention_bias,
        out_bias=view.attention_bias,
        mlp_bias=view.mlp_bias,
    )
    return Decoder(
        embedding=embedding,
        blocks=[
            DecoderBlock(
                SelfAttention(context, i, facts, qkv_bias=view.attention_bias, out_bias=view.attention_bias),
                MLP(context, hidden, view.intermediate_size, bias=view.mlp_bias),
                RMSNorm(context, hidden, eps),
                RMSNorm(context, hidden, eps),
            )
            for i in range(view.num_layers)
        ],
        norm=RMSNorm(context, hidden, eps),
        head=LMHead(context, view.vocab_size, hidden, tied_to=embedding if view.tied else None),
        rotaries=[Rotary(context, view.rope, facts.head_size)],
        table=table,
    )


GGUF = GGUFNames(
    arch="llama",
    architecture="LlamaForCausalLM",
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
        "blk.{i}.attn_v.weight": "model.layers.{i}.self_attn.v_proj.weight",
        "blk.{i}.attn_output.weight": "model.layers.{i}.self_attn.o_proj.weight",
        "blk.{i}.ffn_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
        "blk.{i}.ffn_gate.weight": "model.layers.{i}.mlp.gate_proj.weight",
        "blk.{i}.ffn_up.weight": "model.layers.{i}.mlp.up_proj.weight",
        "blk.{i}.ffn_down.weight": "model.layers.{i}.mlp.down_proj.weight",
    },
    permuted={"self_attn.q_proj.weight": "num_attention_heads", "self_attn.k_proj.weight": "num_key_value_heads"},
)

EXAMPLE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@hookimpl
def infer_models() -> list[ModelSpec]:
    mistral = EXAMPLE | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 16,
        "tie_word_embeddings": False,
    }
    return [
        ModelSpec(
            name=name,
            api=API_VERSION,
            factory=f"{__name__}:factory",
            architectures=(example["architectures"][0],),
            config_view=f"{__name__}:config_view",
            gguf=gguf,
            example=example,
        )
        for name, gguf, example in (("llama", GGUF, EXAMPLE), ("mistral", None, mistral))
    ]
