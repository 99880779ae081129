"""Multi-head latent attention in its plain form: keys and values of all heads are expanded from one latent, then cached.

Called on the worker thread; owns the projections and knows its layer id, never where the cache lies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from infer.layers.attention import Attention, AttentionFacts
from infer.layers.linear import Linear
from infer.layers.norm import RMSNorm
from infer.layers.parameter import Layer

if TYPE_CHECKING:
    from infer.layers.facts import Facts
    from infer.layers.rotary import RopeFacts
    from infer.plugins.model import BuildContext, ForwardBatch

LATENT_EPS = 1e-6
"""Of the norms of the latents; DeepSeek's code and transformers' do not read rms_norm_eps here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentFacts:
    """Shape and rules of one layer (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""

    hidden_size: int
    num_heads: int
    q_rank: int | None
    """Size of the queries' latent; None: queries are projected in one step."""
    kv_rank: int
    """Size of the latent that keys and values come from."""
    nope_size: int
    """Of a query or key head: the part without position."""
    rope_size: int
    """Of a query or key head: the rotated part, which all key heads share."""
    value_size: int
    scale: float
    interleaved: bool = True
    """The rotated part pairs neighbours (0, 1), (2, 3), ... instead of the halves' members."""
    bias: bool = False

    @property
    def head_size(self) -> int:
        return self.nope_size + self.rope_size

    @property
    def attention(self) -> AttentionFacts:
        """What the cache and the kernels see: as many key heads as query heads, and narrower values."""
        return AttentionFacts(
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_size=self.head_size,
            value_head_size=self.value_size,
            scale=self.scale,
        )


class LatentAttention(Layer):
    """Queries (through a latent of their own, or not), the shared latent of keys and values, attention over all heads."""

    def __init__(self, context: BuildContext, layer_id: int, facts: LatentFacts) -> None:
        self.latent = facts
        self.facts = facts.attention
        self.rotate = context.ops.rotary
        hidden, heads = facts.hidden_size, facts.num_heads
        self.q_a: Linear | None = None
        self.q_norm: RMSNorm | None = None
        if facts.q_rank is not None:
            self.q_a = Linear(context, hidden, facts.q_rank, bias=facts.bias)
            self.q_norm = RMSNorm(context, facts.q_rank, LATENT_EPS)
        self.q_b = Linear(context, facts.q_rank or hidden, heads * facts.head_size)
        self.kv_a = Linear(context, hidden, facts.kv_rank + facts.rope_size, bias=facts.bias)
        self.kv_norm = RMSNorm(context, facts.kv_rank, LATENT_EPS)
        self.kv_b = Linear(context, facts.kv_rank, heads * (facts.nope_size + facts.value_size))
        self.out = Linear(context, heads * facts.value_size, hidden, bias=facts.bias)
        self.attention = Attention(context, layer_id, self.facts)

    def __call__(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], batch: ForwardBatch) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        facts, (num_tokens, _) = self.latent, x.shape
        queries = x
        if self.q_a is not None and self.q_norm is not None:
            queries = self.q_norm(self.q_a(x))
        q_nope, q_rope = (
            self.q_b(queries)
            .view(num_tokens, facts.num_heads, facts.head_size)
            .split_with_sizes((facts.nope_size, facts.rope_size), dim=2)
        )
        latent, shared = self.kv_a(x).split_with_sizes((facts.kv_rank, facts.rope_size), dim=1)
        k_nope, v = (
            self.kv_b(self.kv_norm(latent))
            .view(num_tokens, facts.num_heads, facts.nope_size + facts.value_size)
            .split_with_sizes((facts.nope_size, facts.value_size), dim=2)
        )
        k_rope = shared.unsqueeze(1)
        if facts.interleaved:
            q_rope, k_rope = _halves(q_rope), _halves(k_rope)
        q_rope, k_rope = self.rotate(q_rope, k_rope, *cos_sin)
        q = torch.cat((q_nope, q_rope), dim=2)
        k = torch.cat((k_nope, k_rope.expand(-1, facts.num_heads, -1)), dim=2)
        return self.out(self.attention(q, k, v, batch))


def _halves(x: Tensor) -> Tensor:
    """[.., R] with pairs as neighbours -> first members, then second ones. Queries and keys alike: products stay."""
    return torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)


def read_latent(facts: Facts, rope: RopeFacts, *, interleaved: bool) -> LatentFacts:
    """From config.json; the numbers are transformers' defaults, the same for DeepSeek-V2 and V3."""
    heads = facts.integer("num_attention_heads")
    facts.must_be("num_key_value_heads", heads)  # another number means nothing: every head has keys of its own
    nope, rotated = facts.integer("qk_nope_head_dim", 128), facts.even("qk_rope_head_dim", 64)
    low_rank = "q_lora_rank" not in facts.raw or facts.raw["q_lora_rank"] is not None  # null: no latent for queries
    return LatentFacts(
        hidden_size=facts.integer("hidden_size"),
        num_heads=heads,
        q_rank=facts.integer("q_lora_rank", 1536) if low_rank else None,
        kv_rank=facts.integer("kv_lora_rank", 512),
        nope_size=nope,
        rope_size=rotated,
        value_size=facts.integer("v_head_dim", 128),
        scale=(nope + rotated) ** -0.5 * rope.scale_multiplier,
        interleaved=interleaved,
        bias=facts.flag("attention_bias", False),
    )
