"""DeepSeek-V3 and R1: latent attention, and experts behind a sigmoid router whose choice a bias per expert corrects.

Built on the worker thread. Facts: the DeepSeek-V3 report (arXiv:2412.19437) and config.json.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from infer.config.model import ModelConfig
from infer.layers.decoder import Decoder, DecoderBlock
from infer.layers.embedding import Embedding
from infer.layers.facts import Facts
from infer.layers.latent_attention import LatentAttention, LatentFacts, read_latent
from infer.layers.linear import LMHead
from infer.layers.mlp import MLP
from infer.layers.moe import MoEFacts, SparseMoE, read_grouped_moe
from infer.layers.norm import RMSNorm
from infer.layers.rotary import RopeFacts, Rotary
from infer.plugins.hookspecs import hookimpl
from infer.plugins.model import API_VERSION, ModelSpec
from infer.plugins.platform import Routing
from infer.weights.mapping import WeightTable, add_experts, add_latent_attention, add_shared_expert, decoder_table

if TYPE_CHECKING:
    from infer.plugins.model import BuildContext


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV3Config:
    """What the architecture needs from config.json."""

    vocab_size: int
    num_layers: int
    num_dense_layers: int
    """The first layers, which have an MLP instead of experts."""
    intermediate_size: int
    """Of the dense layers."""
    shared_size: int
    """Of the expert that every token visits."""
    eps: float
    tied: bool
    attention: LatentFacts
    rope: RopeFacts
    moe: MoEFacts
    num_extra_layers: int
    """Multi-token-prediction layers that the checkpoint may carry behind the decoder's, under the next numbers. They are
    left out: no layer is built for them, and no router of theirs is bound."""


def config_view(config: ModelConfig) -> DeepseekV3Config:
    facts = Facts(config)
    facts.must_be("hidden_act", "silu")
    facts.must_be("moe_layer_freq", 1)
    facts.must_be("num_hash_layers", 0)
    facts.must_be("scoring_func", "sigmoid")
    facts.must_be("topk_method", "noaux_tc")
    rope = facts.rope(theta=10000.0)
    rule = Routing(
        top_k=1,
        scoring="sigmoid",
        renormalize=facts.flag("norm_topk_prob", True),
        num_groups=facts.integer("n_group", 8),
        top_groups=facts.integer("topk_group", 4),
        group_score="top2_sum",
        scale=facts.number("routed_scaling_factor", 2.5),
    )
    moe = read_grouped_moe(facts, num_experts=256, top_k=8, size=2048, rule=rule)
    return DeepseekV3Config(
        vocab_size=config.vocab_size,
        num_layers=facts.integer("num_hidden_layers"),
        num_dense_layers=facts.integer("first_k_dense_replace", 3, minimum=0),
        intermediate_size=facts.integer("intermediate_size", 18432),
        shared_size=moe.intermediate_size * facts.integer("n_shared_experts", 1),
        eps=facts.number("rms_norm_eps", 1e-6),
        tied=facts.flag("tie_word_embeddings", False),
        attention=read_latent(facts, rope, interleaved=facts.flag("rope_interleave", True)),
        rope=rope,
        moe=moe,
        num_extra_layers=facts.integer("num_nextn_predict_layers", 1, minimum=0),
    )


def factory(config: ModelConfig, context: BuildContext) -> Decoder:
    view = config_view(config)
    hidden, eps = view.attention.hidden_size, view.eps
    embedding = Embedding(context, view.vocab_size, hidden)
    return Decoder(
        embedding=embedding,
        blocks=[
            DecoderBlock(
                LatentAttention(context, i, view.attention),
                MLP(context, hidden, view.intermediate_size)
                if i < view.num_dense_layers
                else SparseMoE(context, i, view.moe, shared=MLP(context, hidden, view.shared_size)),
                RMSNorm(context, hidden, eps),
                RMSNorm(context, hidden, eps),
            )
            for i in range(view.num_layers)
        ],
        norm=RMSNorm(context, hidden, eps),
        head=LMHead(context, view.vocab_size, hidden, tied_to=embedding if view.tied else None),
        rotaries=[Rotary(context, view.rope, view.attention.rope_size)],
        table=weight_table(view),
    )


def weight_table(view: DeepseekV3Config) -> WeightTable:
    attention, moe = view.attention, view.moe
    table = decoder_table(
        num_layers=view.num_layers,
        q_rows=None,
        intermediate_size=view.intermediate_size,
        tied=view.tied,
        norms={"input_layernorm": "input_norm", "post_attention_layernorm": "post_norm"},
        dense=range(view.num_dense_layers),
    )
    for i in range(view.num_layers):
        hf, block = f"model.layers.{i}", f"blocks.{i}"
        low_rank = attention.q_rank is not None
        add_latent_attention(
            table, f"{hf}.self_attn", f"{block}.attention", low_rank_queries=low_rank, bias=attention.bias
        )
        if i < view.num_dense_layers:
            continue
        table.add(f"{hf}.mlp.gate.weight", f"{block}.mlp.router")
        table.add(f"{hf}.mlp.gate.e_score_correction_bias", f"{block}.mlp.score_bias")
        add_experts(
            table,
            f"{hf}.mlp.experts",
            f"{block}.mlp",
            num_experts=moe.num_experts,
            hidden_size=moe.hidden_size,
            intermediate_size=moe.intermediate_size,
        )
        add_shared_expert(table, f"{hf}.mlp.shared_experts", f"{block}.mlp.shared", view.shared_size)
    for i in range(view.num_layers, view.num_layers + view.num_extra_layers):
        table.leave_out(f"model.layers.{i}")
    return table


EXAMPLE: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "rope_interleave": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


@hookimpl
def infer_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="deepseek_v3",
            api=API_VERSION,
            factory=f"{__name__}:factory",
            architectures=("DeepseekV3ForCausalLM",),
            config_view=f"{__name__}:config_view",
            example=EXAMPLE,
        )
    ]
