"""Qwen3 mixture of experts: Qwen3 whose MLPs are, in most or all layers, experts behind a softmax router.

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
from infer.layers.moe import MoEFacts, SparseMoE, read_moe, sparse_layers
from infer.layers.norm import RMSNorm
from infer.layers.rotary import RopeFacts, Rotary
from infer.plugins.hookspecs import hookimpl
from infer.plugins.model import API_VERSION, GGUFNames, ModelSpec
from infer.weights.mapping import WeightTable, add_experts, decoder_table

if TYPE_CHECKING:
    from infer.plugins.model import BuildContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3MoeConfig:
    """What the architecture needs from config.json."""

    vocab_size: int
    intermediate_size: int
    """Of the layers without experts."""
    eps: float
    tied: bool
    attention_bias: bool
    attention: AttentionFacts
    rope: RopeFacts
    sparse: tuple[bool, ...]
    """One per layer."""
    moe: MoEFacts


def config_view(config: ModelConfig) -> Qwen3MoeConfig:
    facts = Facts(config)
    facts.must_be("hidden_act", "silu")
    num_heads, num_kv_heads, head_size = facts.heads(kv_default=4)
    window = facts.integer("sliding_window", 4096) if facts.flag("use_sliding_window", False) else None
    return Qwen3MoeConfig(
        vocab_size=config.vocab_size,
        intermediate_size=facts.integer("intermediate_size", 6144),
        eps=facts.number("rms_norm_eps", 1e-6),
        tied=facts.flag("tie_word_embeddings", False),
        attention_bias=facts.flag("attention_bias", False),
        attention=AttentionFacts(
            hidden_size=facts.integer("hidden_size"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            scale=head_size**-0.5,
            window=window,
        ),
        rope=facts.rope(theta=10000.0),
        sparse=sparse_layers(facts, facts.integer("num_hidden_layers")),
        moe=read_moe(
            facts,
            size_key="moe_intermediate_size",
            num_experts=128,
            top_k=8,
            renormalize=facts.flag("norm_topk_prob", False),
        ),
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
                SelfAttention(
                    context,
                    i,
                    facts,
                    qkv_bias=view.attention_bias,
                    out_bias=view.attention_bias,
                    qk_norm=(RMSNorm(context, facts.head_size, eps), RMSNorm(context, facts.head_size, eps)),
                ),
                SparseMoE(context, i, view.moe) if sparse else MLP(context, hidden, view.intermediate_size),
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


def weight_table(view: Qwen3MoeConfig) -> WeightTable:
    facts, moe = view.attention, view.moe
    table = decoder_table(
        num_layers=len(view.sparse),
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
        dense=[i for i, sparse in enumerate(view.sparse) if not sparse],
    )
    for i in (i for i, sparse in enumerate(view.sparse) if sparse):
        table.add(f"model.layers.{i}.mlp.gate.weight", f"blocks.{i}.mlp.router")
        add_experts(
            table,
            f"model.layers.{i}.mlp.experts",
            f"blocks.{i}.mlp",
            num_experts=moe.num_experts,
            hidden_size=moe.hidden_size,
            intermediate_size=moe.intermediate_size,
        )
    return table


GGUF = GGUFNames(
    arch="qwen3moe",
    architecture="Qwen3MoeForCausalLM",
    config_keys={
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "head_dim": "attention.key_length",
        "moe_intermediate_size": "expert_feed_forward_length",
        "num_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
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
        "blk.{i}.ffn_gate_inp.weight": "model.layers.{i}.mlp.gate.weight",
        "blk.{i}.ffn_gate_exps.weight": "model.layers.{i}.mlp.experts.{e}.gate_proj.weight",
        "blk.{i}.ffn_up_exps.weight": "model.layers.{i}.mlp.experts.{e}.up_proj.weight",
        "blk.{i}.ffn_down_exps.weight": "model.layers.{i}.mlp.experts.{e}.down_proj.weight",
    },
    fixed={"norm_topk_prob": True},  # no key in the file; llama.cpp decides by architecture
)

EXAMPLE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@hookimpl
def infer_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="qwen3_moe",
            api=API_VERSION,
            factory=f"{__name__}:factory",
            architectures=("Qwen3MoeForCausalLM",),
            config_view=f"{__name__}:config_view",
            gguf=GGUF,
            example=EXAMPLE,
        )
    ]
