"""Qwen2 mixture of experts: routed experts beside one that every token visits, scaled by a gate of its own.

Built on the worker thread. Facts: the Qwen2 report (arXiv:2407.10671) and config.json.
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
from infer.layers.moe import MoEFacts, SparseMoE, read_moe, sparse_layers
from infer.layers.norm import RMSNorm
from infer.layers.rotary import RopeFacts, Rotary
from infer.plugins.hookspecs import hookimpl
from infer.plugins.model import API_VERSION, ModelSpec
from infer.weights.mapping import WeightTable, add_experts, decoder_table

if TYPE_CHECKING:
    from infer.plugins.model import BuildContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2MoeConfig:
    """What the architecture needs from config.json."""

    vocab_size: int
    intermediate_size: int
    """Of the layers without experts."""
    shared_size: int
    """Of the expert that every token visits."""
    eps: float
    tied: bool
    qkv_bias: bool
    attention: tuple[AttentionFacts, ...]
    """One per layer."""
    rope: RopeFacts
    sparse: tuple[bool, ...]
    """One per layer."""
    moe: MoEFacts


def config_view(config: ModelConfig) -> Qwen2MoeConfig:
    facts = Facts(config)
    facts.must_be("hidden_act", "silu")
    num_heads, num_kv_heads, head_size = facts.heads(kv_default=16)
    num_layers = facts.integer("num_hidden_layers")
    window = facts.integer("sliding_window", 4096) if facts.flag("use_sliding_window", False) else None
    below = facts.integer("max_window_layers", 28, minimum=0)
    slides = [window is not None and i % 2 == 0 and i < below for i in range(num_layers)]
    return Qwen2MoeConfig(
        vocab_size=config.vocab_size,
        intermediate_size=facts.integer("intermediate_size", 5632),
        shared_size=facts.integer("shared_expert_intermediate_size", 5632),
        eps=facts.number("rms_norm_eps", 1e-6),
        tied=facts.flag("tie_word_embeddings", False),
        qkv_bias=facts.flag("qkv_bias", True),
        attention=tuple(
            AttentionFacts(
                hidden_size=facts.integer("hidden_size"),
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_size=head_size,
                scale=head_size**-0.5,
                window=window,
            )
            for window in facts.windows(num_layers, window, slides)
        ),
        rope=facts.rope(theta=10000.0),
        sparse=sparse_layers(facts, num_layers),
        moe=read_moe(
            facts,
            size_key="moe_intermediate_size",
            num_experts=60,
            top_k=4,
            renormalize=facts.flag("norm_topk_prob", False),
        ),
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
                SelfAttention(context, i, view.attention[i], qkv_bias=view.qkv_bias),
                SparseMoE(context, i, view.moe, shared=MLP(context, hidden, view.shared_size), shared_gate=True)
                if sparse
                else MLP(context, hidden, view.intermediate_size),
                RMSNorm(context, hidden, eps),
                RMSNorm(context, hidden, eps),
            )
            for i, sparse in enumerate(view.sparse)
        ],
        norm=RMSNorm(context, hidden, eps),
        head=LMHead(context, view.vocab_size, hidden, tied_to=embedding if view.tied else None),
        rotaries=[Rotary(context, view.rope, facts.head_size)],
        table=weight_table(view),
    )


def weight_table(view: Qwen2MoeConfig) -> WeightTable:
    facts, moe = view.attention[0], view.moe
    table = decoder_table(
        num_layers=len(view.sparse),
        q_rows=facts.q_rows,
        kv_rows=facts.kv_rows,
        intermediate_size=view.intermediate_size,
        tied=view.tied,
        norms={"input_layernorm": "input_norm", "post_attention_layernorm": "post_norm"},
        qkv_bias=view.qkv_bias,
        dense=[i for i, sparse in enumerate(view.sparse) if not sparse],
    )
    for i in (i for i, sparse in enumerate(view.sparse) if sparse):
        hf, block = f"model.layers.{i}.mlp", f"blocks.{i}.mlp"
        table.add(f"{hf}.gate.weight", f"{block}.router")
        add_experts(
            table,
            f"{hf}.experts",
            block,
            num_experts=moe.num_experts,
            hidden_size=moe.hidden_size,
            intermediate_size=moe.intermediate_size,
        )
        halves = [(f"{hf}.shared_expert.{part}_proj.weight", view.shared_size) for part in ("gate", "up")]
        table.add_shards(f"{block}.shared.gate_up.weight", halves)
        table.add(f"{hf}.shared_expert.down_proj.weight", f"{block}.shared.down.weight")
        table.add(f"{hf}.shared_expert_gate.weight", f"{block}.shared_gate")
    return table


EXAMPLE: dict[str, Any] = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@hookimpl
def infer_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="qwen2_moe",
            api=API_VERSION,
            factory=f"{__name__}:factory",
            architectures=("Qwen2MoeForCausalLM",),
            config_view=f"{__name__}:config_view",
            example=EXAMPLE,
        )
    ]
