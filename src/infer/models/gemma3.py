"""Gemma 3 text: four norms a block, (1 + w) norms, q/k norms, five sliding layers to one that sees everything.

Built on the worker thread. Facts: the Gemma 3 report (arXiv:2503.19786) and config.json.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from infer.config.model import ModelConfig
from infer.layers.attention import AttentionFacts, SelfAttention
from infer.layers.decoder import Angles, Decoder
from infer.layers.embedding import Embedding
from infer.layers.facts import Facts
from infer.layers.linear import LMHead
from infer.layers.mlp import MLP
from infer.layers.norm import RMSNorm
from infer.layers.parameter import Layer
from infer.layers.rotary import RopeFacts, Rotary
from infer.plugins.hookspecs import hookimpl
from infer.plugins.model import API_VERSION, GGUFNames, ModelSpec
from infer.weights.mapping import decoder_table

if TYPE_CHECKING:
    from torch import Tensor

    from infer.plugins.model import BuildContext, ForwardBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Config:
    """What the architecture needs from config.json."""

    vocab_size: int
    intermediate_size: int
    eps: float
    tied: bool
    attention_bias: bool
    attention: tuple[AttentionFacts, ...]
    """One per layer."""
    global_rope: RopeFacts
    local_rope: RopeFacts
    """Of the sliding layers."""
    logit_softcap: float | None


def config_view(config: ModelConfig) -> Gemma3Config:
    facts = Facts(config)
    facts.must_be("hidden_activation", "gelu_pytorch_tanh")
    facts.must_be("use_bidirectional_attention", False)
    num_heads, num_kv_heads, head_size = facts.heads(kv_default=4, size_default=256)
    num_layers = facts.integer("num_hidden_layers")
    pattern = facts.integer("sliding_window_pattern", facts.integer("_sliding_window_pattern", 6))
    slides = [(i + 1) % pattern != 0 for i in range(num_layers)]
    windows = facts.windows(num_layers, facts.integer("sliding_window", 4096), slides)
    ropes = config.raw.get("rope_parameters") or {}
    hidden_size = facts.integer("hidden_size")
    scalar = facts.number("query_pre_attn_scalar", _silent_scalar(config, hidden_size, num_heads, head_size))
    return Gemma3Config(
        vocab_size=config.vocab_size,
        intermediate_size=facts.integer("intermediate_size"),
        eps=facts.number("rms_norm_eps", 1e-6),
        tied=facts.flag("tie_word_embeddings", True),
        attention_bias=facts.flag("attention_bias", False),
        attention=tuple(
            AttentionFacts(
                hidden_size=hidden_size,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_size=head_size,
                scale=scalar**-0.5,
                window=window,
                softcap=facts.optional_number("attn_logit_softcapping"),
            )
            for window in windows
        ),
        global_rope=facts.rope(ropes.get("full_attention") or config.raw.get("rope_scaling") or {}, theta=1e6),
        local_rope=facts.rope(ropes.get("sliding_attention") or {}, theta_key="rope_local_base_freq", theta=1e4),
        logit_softcap=facts.optional_number("final_logit_softcapping"),
    )


def _silent_scalar(config: ModelConfig, hidden_size: int, num_heads: int, head_size: int) -> float:
    """query_pre_attn_scalar of a file that does not state it: transformers' default, or for a GGUF the published
    models' value, which is the head size but for the 27B model (62 layers)."""
    if config.format != "gguf":
        return 256.0
    return hidden_size / num_heads if config.raw.get("num_hidden_layers") == 62 else float(head_size)


class Gemma3Block(Layer):
    """norm, attention, norm, add; norm, MLP, norm, add."""

    def __init__(self, context: BuildContext, layer_id: int, facts: AttentionFacts, view: Gemma3Config) -> None:
        def norm(size: int) -> RMSNorm:
            return RMSNorm(context, size, view.eps, offset=1.0)

        self.attention = SelfAttention(
            context,
            layer_id,
            facts,
            qkv_bias=view.attention_bias,
            out_bias=view.attention_bias,
            qk_norm=(norm(facts.head_size), norm(facts.head_size)),
        )
        self.mlp = MLP(context, facts.hidden_size, view.intermediate_size, activation="gelu_tanh")
        self.input_norm = norm(facts.hidden_size)
        self.attention_norm = norm(facts.hidden_size)
        self.mlp_input_norm = norm(facts.hidden_size)
        self.mlp_norm = norm(facts.hidden_size)
        self.rotary = 0 if facts.window is None else 1

    def __call__(
        self, x: Tensor, residual: Tensor | None, angles: Angles, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            x, residual = self.input_norm(x), x
        else:
            x, residual = self.input_norm.add(x, residual)
        x = self.attention_norm(self.attention(x, angles[self.rotary], batch))
        x, residual = self.mlp_input_norm.add(x, residual)
        return self.mlp_norm(self.mlp(x)), residual


def factory(config: ModelConfig, context: BuildContext) -> Decoder:
    view = config_view(config)
    facts = view.attention[0]
    hidden = facts.hidden_size
    embedding = Embedding(context, view.vocab_size, hidden, scale=hidden**0.5)
    return Decoder(
        embedding=embedding,
        blocks=[Gemma3Block(context, i, layer, view) for i, layer in enumerate(view.attention)],
        norm=RMSNorm(context, hidden, view.eps, offset=1.0),
        head=LMHead(context, view.vocab_size, hidden, tied_to=embedding if view.tied else None),
        rotaries=[Rotary(context, rope, facts.head_size) for rope in (view.global_rope, view.local_rope)],
        table=decoder_table(
            num_layers=len(view.attention),
            q_rows=facts.q_rows,
            kv_rows=facts.kv_rows,
            intermediate_size=view.intermediate_size,
            tied=view.tied,
            norms={
                "input_layernorm": "input_norm",
                "post_attention_layernorm": "attention_norm",
                "pre_feedforward_layernorm": "mlp_input_norm",
                "post_feedforward_layernorm": "mlp_norm",
                "self_attn.q_norm": "attention.q_norm",
                "self_attn.k_norm": "attention.k_norm",
            },
            qkv_bias=view.attention_bias,
            out_bias=view.attention_bias,
        ),
        logit_softcap=view.logit_softcap,
    )


GGUF = GGUFNames(
    arch="gemma3",
    architecture="Gemma3ForCausalLM",
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
        "rope_local_base_freq": "rope.freq_base_swa",
        "sliding_window": "attention.sliding_window",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    tensors={
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
        "blk.{i}.attn_norm.weight": "model.layers.{i}.input_layernorm.weight",
        "blk.{i}.attn_q.weight": "model.layers.{i}.self_attn.q_proj.weight",
        "blk.{i}.attn_k.weight": "model.layers.{i}.self_attn.k_proj.weight",
        "blk.{i}.attn_v.weight": "model.layers.{i}.self_attn.v_proj.weight",
        "blk.{i}.attn_q_norm.weight": "model.layers.{i}.self_attn.q_norm.weight",
        "blk.{i}.attn_k_norm.weight": "model.layers.{i}.self_attn.k_norm.weight",
        "blk.{i}.attn_output.weight": "model.layers.{i}.self_attn.o_proj.weight",
        "blk.{i}.post_attention_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
        "blk.{i}.ffn_norm.weight": "model.layers.{i}.pre_feedforward_layernorm.weight",
        "blk.{i}.ffn_gate.weight": "model.layers.{i}.mlp.gate_proj.weight",
        "blk.{i}.ffn_up.weight": "model.layers.{i}.mlp.up_proj.weight",
        "blk.{i}.ffn_down.weight": "model.layers.{i}.mlp.down_proj.weight",
        "blk.{i}.post_ffw_norm.weight": "model.layers.{i}.post_feedforward_layernorm.weight",
    },
    norm_offset=1.0,
)

EXAMPLE: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "query_pre_attn_scalar": 24,
    "sliding_window": 16,
    "sliding_window_pattern": 2,
    "final_logit_softcapping": 30.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}


@hookimpl
def infer_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="gemma3",
            api=API_VERSION,
            factory=f"{__name__}:factory",
            architectures=("Gemma3ForCausalLM",),
            config_view=f"{__name__}:config_view",
            gguf=GGUF,
            example=EXAMPLE,
        )
    ]
