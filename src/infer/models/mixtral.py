"""Mixtral: Mistral whose MLPs are experts, two of eight per token.

Built on the worker thread. Facts: the Mixtral report (arXiv:2401.04088) and config.json.
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
from infer.layers.moe import MoEFacts, SparseMoE, read_moe
from infer.layers.norm import RMSNorm
from infer.layers.rotary import RopeFacts, Rotary
from infer.plugins.hookspecs import hookimpl
from infer.plugins.model import API_VERSION, ModelSpec
from infer.weights.mapping import WeightTable, add_experts, decoder_table

if TYPE_CHECKING:
    from infer.plugins.model import BuildContext


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtralConfig:
    """What the architecture needs from config.json."""

    vocab_size: int
    num_layers: int
    eps: float
    tied: bool
    attention: AttentionFacts
    rope: RopeFacts
    moe: MoEFacts


def config_view(config: ModelConfig) -> MixtralConfig:
    facts = Facts(config)
    facts.must_be("hidden_act", "silu")
    num_heads, num_kv_heads, head_size = facts.heads(kv_default=8)
    window = None if config.raw.get("sliding_window") is None else facts.integer("sliding_window")
    return MixtralConfig(
        vocab_size=config.vocab_size,
        num_layers=facts.integer("num_hidden_layers"),
        eps=facts.number("rms_norm_eps", 1e-5),
        tied=facts.flag("tie_word_embeddings", False),
        attention=AttentionFacts(
            hidden_size=facts.integer("hidden_size"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            scale=head_size**-0.5,
            window=window,
        ),
        rope=facts.rope(theta=1000000.0),
        # The paper's softmax over the chosen logits, as transformers computes it: over all, then renormalised.
        moe=read_moe(facts, size_key="intermediate_size", num_experts=8, top_k=2, renormalize=True),
    )


def factory(config: ModelConfig, context: BuildContext) -> Decoder:
    view = config_view(config)
    facts = view.attention
    hidden, eps = facts.hidden_size, view.eps
    embedding = Embedding(context, view.vocab_size, hidden)
    return Decoder(
        embedding=embedding,
        blocks=[
            DecoderBlock(
                SelfAttention(context, i, facts),
                SparseMoE(context, i, view.moe),
                RMSNorm(context, hidden, eps),
                RMSNorm(context, hidden, eps),
            )
            for i in range(view.num_layers)
        ],
        norm=RMSNorm(context, hidden, eps),
        head=LMHead(context, view.vocab_size, hidden, tied_to=embedding if view.tied else None),
        rotaries=[Rotary(context, view.rope, facts.head_size)],
        table=weight_table(view),
    )


def weight_table(view: MixtralConfig) -> WeightTable:
    facts, moe = view.attention, view.moe
    table = decoder_table(
        num_layers=view.num_layers,
        q_rows=facts.q_rows,
        kv_rows=facts.kv_rows,
        intermediate_size=moe.intermediate_size,
        tied=view.tied,
        norms={"input_layernorm": "input_norm", "post_attention_layernorm": "post_norm"},
        dense=(),
    )
    for i in range(view.num_layers):
        hf = f"model.layers.{i}.block_sparse_moe"
        table.add(f"{hf}.gate.weight", f"blocks.{i}.mlp.router")
        add_experts(
            table,
            f"{hf}.experts",
            f"blocks.{i}.mlp",
            num_experts=moe.num_experts,
            hidden_size=moe.hidden_size,
            intermediate_size=moe.intermediate_size,
            names=("w1", "w3", "w2"),
        )
    return table


EXAMPLE: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@hookimpl
def infer_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="mixtral",
            api=API_VERSION,
            factory=f"{__name__}:factory",
            architectures=("MixtralForCausalLM",),
            config_view=f"{__name__}:config_view",
            example=EXAMPLE,
        )
    ]
