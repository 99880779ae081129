"""GPT-2 (Radford et al. 2019): learned positions, layer norms with biases, MLPs without a gate, a head tied to the embedding.

Built on the worker thread, first on the meta device for planning, out of the layers of infer. Owns nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from infer import ModelError
from infer.layers.attention import Attention, AttentionFacts, kv_layout
from infer.layers.embedding import Embedding
from infer.layers.facts import Facts
from infer.layers.linear import Linear, LMHead
from infer.layers.parameter import Layer, Parameter
from infer.plugins import ModelSpec, hookimpl
from infer.weights.mapping import WeightTable

if TYPE_CHECKING:
    from infer.config.model import KVLayout, ModelConfig
    from infer.plugins import BuildContext, ForwardBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class GPT2Config:
    """What the architecture needs from config.json."""

    vocab_size: int
    num_positions: int
    num_layers: int
    intermediate_size: int
    eps: float
    tied: bool
    attention: AttentionFacts


def config_view(config: ModelConfig) -> GPT2Config:
    """GPT-2's keys, or those of other models, which transformers takes too. Raises `ModelError` that names the key."""
    facts = Facts(config)
    facts.must_be("activation_function", "gelu_new", "gelu_pytorch_tanh")  # two names of one function
    facts.must_be("add_cross_attention", False)
    facts.must_be("scale_attn_weights", True)
    facts.must_be("scale_attn_by_inverse_layer_idx", False)

    def size(name: str, other: str) -> int:
        return facts.integer(name if name in config.raw else other)

    hidden, heads = size("n_embd", "hidden_size"), size("n_head", "num_attention_heads")
    if hidden % heads:
        raise ModelError(f"{config.architecture}: n_embd={hidden} must be a multiple of n_head={heads}")
    return GPT2Config(
        vocab_size=config.vocab_size,
        num_positions=config.max_position,
        num_layers=size("n_layer", "num_hidden_layers"),
        intermediate_size=facts.integer("n_inner", 4 * hidden),
        eps=facts.number("layer_norm_epsilon", 1e-5),
        tied=facts.flag("tie_word_embeddings", True),
        attention=AttentionFacts(
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=heads,
            head_size=hidden // heads,
            scale=(hidden // heads) ** -0.5,
        ),
    )


class LayerNorm(Layer):
    """(x - mean) / standard deviation * weight + bias over the last dimension (arXiv:1607.06450)."""

    def __init__(self, context: BuildContext, size: int, eps: float) -> None:
        self.eps = eps
        self.weight, self.bias = (
            Parameter(torch.empty(size, dtype=context.dtype, device=context.device)) for _ in range(2)
        )

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, N] -> [T, N]. No platform has an op for it; torch's treats every row by itself."""
        return F.layer_norm(x, x.shape[-1:], self.weight.data, self.bias.data, self.eps)


class SelfAttention(Layer):
    """Attention over the paged cache; positions are in the embedding, so nothing is rotated."""

    def __init__(self, context: BuildContext, layer_id: int, facts: AttentionFacts) -> None:
        self.qkv = Linear(context, facts.hidden_size, 3 * facts.hidden_size, bias=True)
        self.out = Linear(context, facts.hidden_size, facts.hidden_size, bias=True)
        self.attention = Attention(context, layer_id, facts)

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        facts = self.attention.facts
        q, k, v = self.qkv(x).view(x.shape[0], 3, facts.num_heads, facts.head_size).unbind(1)
        return self.out(self.attention(q, k, v, batch))


class PlainMLP(Layer):
    """down(gelu(up x))."""

    def __init__(self, context: BuildContext, hidden_size: int, intermediate_size: int) -> None:
        self.up = Linear(context, hidden_size, intermediate_size, bias=True)
        self.down = Linear(context, intermediate_size, hidden_size, bias=True)
        self.gelu_and_mul = context.ops.gelu_tanh_and_mul

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        up = self.up(x)
        # The platform's gated op, with a gate that lets all through: the last bits of torch's own tanh depend on where an
        # element lies in the tensor, and so on the requests beside it.
        return self.down(self.gelu_and_mul(torch.cat([up, torch.ones_like(up)], dim=-1)))


class Block(Layer):
    """norm, attention, add, norm, MLP, add."""

    def __init__(self, context: BuildContext, layer_id: int, view: GPT2Config) -> None:
        hidden = view.attention.hidden_size
        self.attention = SelfAttention(context, layer_id, view.attention)
        self.mlp = PlainMLP(context, hidden, view.intermediate_size)
        self.attention_norm = LayerNorm(context, hidden, view.eps)
        self.mlp_norm = LayerNorm(context, hidden, view.eps)

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        x = x + self.attention(self.attention_norm(x), batch)
        return x + self.mlp(self.mlp_norm(x))


class GPT2(Layer):
    """A `CausalLM` whose hidden states can be read (`SupportsHiddenTaps`)."""

    def __init__(self, context: BuildContext, view: GPT2Config) -> None:
        hidden = view.attention.hidden_size
        self.view = view
        self.tokens = Embedding(context, view.vocab_size, hidden)
        self.positions = Embedding(context, view.num_positions, hidden)
        self.blocks = [Block(context, i, view) for i in range(view.num_layers)]
        self.norm = LayerNorm(context, hidden, view.eps)
        self.head = LMHead(context, view.vocab_size, hidden, tied_to=self.tokens if view.tied else None)
        self.hidden_taps: Mapping[int, Tensor] = {}

    def forward(self, batch: ForwardBatch) -> Tensor:
        """-> final hidden states [T, hidden], normed."""
        x = self.tokens(batch.token_ids) + self.positions(batch.positions)
        for layer_id, block in enumerate(self.blocks):
            x = block(x, batch)
            if layer_id in self.hidden_taps:
                self.hidden_taps[layer_id][: x.shape[0]].copy_(x)
        return self.norm(x)

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """(hidden [T, hidden], rows [M] int64) -> fp32 [M, vocab]."""
        return self.head(self.head.ops.gather_rows(hidden, rows))

    def kv_layout(self) -> KVLayout:
        return kv_layout([self.view.attention] * self.view.num_layers)

    def weight_table(self) -> WeightTable:
        return weight_table(self.view)

    def hidden_shape(self) -> tuple[int, int]:
        """(layers, hidden size)."""
        return self.view.num_layers, self.view.attention.hidden_size

    def set_hidden_taps(self, taps: Mapping[int, Tensor]) -> None:
        self.hidden_taps = dict(taps)


def weight_table(view: GPT2Config) -> WeightTable:
    """Every tensor of the checkpoint and where it goes. `c_attn` is q, k and v in one; products are stored as [in, out]."""
    table = WeightTable()
    table.add("transformer.wte.weight", "tokens.weight")
    table.add("transformer.wpe.weight", "positions.weight")
    products = {
        "attn.c_attn": "attention.qkv",
        "attn.c_proj": "attention.out",
        "mlp.c_fc": "mlp.up",
        "mlp.c_proj": "mlp.down",
    }
    norms = {"ln_1": "attention_norm", "ln_2": "mlp_norm"}
    for i in range(view.num_layers):
        for name, path in (products | norms).items():
            table.add(f"transformer.h.{i}.{name}.weight", f"blocks.{i}.{path}.weight", transposed=name in products)
            table.add(f"transformer.h.{i}.{name}.bias", f"blocks.{i}.{path}.bias")
        # The causal mask, which older checkpoints store.
        table.ignore(f"transformer.h.{i}.attn.{name}" for name in ("bias", "masked_bias"))
    for kind in ("weight", "bias"):
        table.add(f"transformer.ln_f.{kind}", f"norm.{kind}")
    if view.tied:
        table.ignore(["lm_head.weight"])
    else:
        table.add("lm_head.weight", "head.weight")
    return table


def create(config: ModelConfig, context: BuildContext) -> GPT2:
    return GPT2(context, config_view(config))


EXAMPLE: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
"""A config.json with two layers: the kit builds it with random weights."""


@hookimpl
def infer_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="gpt2",
            api=1,
            factory=f"{__name__}:create",
            architectures=("GPT2LMHeadModel",),
            config_view=f"{__name__}:config_view",
            example=EXAMPLE,
        )
    ]
