"""A model architecture, MyNameForCausalLM: a decoder with grouped attention, rotary positions and gated MLPs.

Built on the worker thread, first on the meta device for planning, out of the layers of infer. Owns nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from infer.layers.attention import AttentionFacts, SelfAttention
from infer.layers.decoder import Decoder, DecoderBlock
from infer.layers.embedding import Embedding
from infer.layers.facts import Facts
from infer.layers.linear import LMHead
from infer.layers.mlp import MLP
from infer.layers.norm import RMSNorm
from infer.layers.rotary import RopeFacts, Rotary
from infer.plugins import ModelSpec, hookimpl
from infer.weights.mapping import decoder_table

if TYPE_CHECKING:
    from infer.config.model import ModelConfig
    from infer.plugins import BuildContext

NORMS = {"input_layernorm": "input_norm", "post_attention_layernorm": "post_norm"}
"""Name in the checkpoint -> attribute of `DecoderBlock`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MyNameConfig:
    """What the architecture needs from config.json."""

    vocab_size: int
    num_layers: int
    intermediate_size: int
    eps: float
    tied: bool
    attention: AttentionFacts
    rope: RopeFacts


def config_view(config: ModelConfig) -> MyNameConfig:
    """Raises `ModelError` that names the key: `Facts` does."""
    facts = Facts(config)
    facts.must_be("hidden_act", "silu")
    num_heads, num_kv_heads, head_size = facts.heads()
    return MyNameConfig(
        vocab_size=config.vocab_size,
        num_layers=facts.integer("num_hidden_layers"),
        intermediate_size=facts.integer("intermediate_size"),
        eps=facts.number("rms_norm_eps", 1e-6),
        tied=facts.flag("tie_word_embeddings", False),
        attention=AttentionFacts(
            hidden_size=facts.integer("hidden_size"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            scale=head_size**-0.5,
        ),
        rope=facts.rope(theta=10000.0),
    )


def create(config: ModelConfig, context: BuildContext) -> Decoder:
    view = config_view(config)
    facts, hidden = view.attention, view.attention.hidden_size
    embedding = Embedding(context, view.vocab_size, hidden)
    blocks = [
        DecoderBlock(
            SelfAttention(context, i, facts),
            MLP(context, hidden, view.intermediate_size),
            RMSNorm(context, hidden, view.eps),
            RMSNorm(context, hidden, view.eps),
        )
        for i in range(view.num_layers)
    ]
    return Decoder(
        embedding=embedding,
        blocks=blocks,
        norm=RMSNorm(context, hidden, view.eps),
        head=LMHead(context, view.vocab_size, hidden, tied_to=embedding if view.tied else None),
        rotaries=[Rotary(context, view.rope, facts.head_size)],
        table=decoder_table(  # every tensor of the checkpoint and where it goes; other names: `WeightTable.add`
            num_layers=view.num_layers,
            q_rows=facts.q_rows,
            kv_rows=facts.kv_rows,
            intermediate_size=view.intermediate_size,
            tied=view.tied,
            norms=NORMS,
        ),
    )


EXAMPLE: dict[str, Any] = {
    "architectures": ["MyNameForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
"""A config.json with two layers: the kit builds it with random weights."""


@hookimpl
def infer_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="my-name",
            api=1,
            factory=f"{__name__}:create",
            architectures=("MyNameForCausalLM",),
            config_view=f"{__name__}:config_view",
            example=EXAMPLE,
        )
    ]
