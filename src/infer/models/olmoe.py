"""OLMoE: a Llama with experts in every layer and an RMS norm over all query (and all key) heads of a token together.

Built on the worker thread. Facts: the OLMoE report (arXiv:2409.02060) and config.json.
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
from infer.plugins.model import API_VERSION, GGUFNames, ModelSpec
from infer.weights.mapping import WeightTable, add_experts, decoder_table

if TYPE_CHECKING:
    from infer.plugins.model import BuildContext


@dataclass(frozen=True, slots=True, kw_only=True)
class OlmoeConfig:
    """What the architecture needs from config.json."""

    vocab_size: int
    num_layers: int
    eps: float
    tied: bool
    attention_bias: bool
    attention: AttentionFacts
    rope: RopeFacts
    moe: MoEFacts


def config_view(config: ModelConfig) -> OlmoeConfig:
    facts = Facts(config)
    facts.must_be("hidden_act", "silu")
    facts.must_be("clip_qkv", None)
    num_heads, num_kv_heads, head_size = facts.heads()
    return OlmoeConfig(
        vocab_size=config.vocab_size,
        num_layers=facts.integer("num_hidden_layers"),
        eps=facts.number("rms_norm_eps", 1e-5),
        tied=facts.flag("tie_word_embeddings", False),
        attention_bias=facts.flag("attention_bias", False),
        attention=AttentionFacts(
            hidden_size=facts.integer("hidden_size"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            scale=head_size**-0.5,
        ),
        rope=facts.rope(theta=10000.0),
        moe=read_moe(
            facts,
            size_key="intermediate_size",
            num_experts=64,
            top_k=8,
            renormalize=facts.flag("norm_topk_prob", False),
        ),
    )


def factory(config: ModelConfig, context: BuildContext) -> Decoder:
    view = config_view(config)
    facts = view.attention
    hidden, eps, bias = facts.hidden_size, view.eps, view.attention_bias
    embedding = Embedding(context, view.vocab_size, hidden)
    return Decoder(
        embedding=embedding,
        blocks=[
            DecoderBlock(
                SelfAttention(
                    context,
                    i,
                    facts,
                    qkv_bias=bias,
                    out_bias=bias,
                    qk_norm=(RMSNorm(context, facts.q_rows, eps), RMSNorm(context, facts.kv_rows, eps)),
                    norm_all_heads=True,
                ),
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


def weight_table(view: OlmoeConfig) -> WeightTable:
    facts, moe = view.attention, view.moe
    table = decoder_table(
        num_layers=view.num_layers,
        q_rows=facts.q_rows,
        kv_rows=facts.kv_rows,
        intermediate_size=moe.intermediate_size,
        tied=view.tied,
        norms={
            "input_layernorm": "input_norm",
            "post_attention_layernorm": "post_norm",
            "self_attn.q_norm": "attention.q_norm",
            "self_attn.k_norm": "attention.k_norm",
        },
        qkv_bias=view.attention_bias,
        out_bias=view.attention_bias,
        dense=(),
    )
    for i in range(view.num_layers):
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
    arch="olmoe",
    architecture="OlmoeForCausalLM",
    config_keys={
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
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
    fixed={"norm_topk_prob": False},  # no key in the file; llama.cpp decides by architecture
)

EXAMPLE: dict[str, Any] = {
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 4,
    "norm_topk_prob": False,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "clip_qkv": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@hookimpl
def infer_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="olmoe",
            api=API_VERSION,
            factory=f"{__name__}:factory",
            architectures=("OlmoeForCausalLM",),
            config_view=f"{__name__}:config_view",
            gguf=GGUF,
            example=EXAMPLE,
        )
    ]
