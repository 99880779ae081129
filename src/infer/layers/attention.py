"""Self-attention of a decoder block over the paged KV cache.

Called on the worker thread; owns the projections and knows its layer id, never where the cache lies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from infer.config.model import KVGroup, KVLayer, KVLayout
from infer.errors import WeightError
from infer.layers.linear import Linear
from infer.layers.norm import RMSNorm
from infer.layers.parameter import Layer
from infer.plugins.platform import UNSCALED, KVScales

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infer.plugins.model import BuildContext, ForwardBatch
    from infer.plugins.platform import AttentionMetadata


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionFacts:
    """Shape and rules of one attention layer."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    """Multiplies q k^T before the softmax."""
    window: int | None = None
    """Position p sees p - window + 1 .. p."""
    softcap: float | None = None
    value_head_size: int | None = None
    """None: values are as wide as keys."""

    @property
    def q_rows(self) -> int:
        return self.num_heads * self.head_size

    @property
    def kv_rows(self) -> int:
        return self.num_kv_heads * self.head_size


class Attention(Layer):
    """Writes this step's keys and values, then attends: the one place that touches the cache of its layer."""

    def __init__(self, context: BuildContext, layer_id: int, facts: AttentionFacts) -> None:
        self.ops = context.ops
        self.layer_id = layer_id
        self.facts = facts
        self.scales = UNSCALED

    def load_scalar(self, name: str, value: float) -> None:
        """ "k_scale" or "v_scale" of the checkpoint: what an 8-bit cache stores keys or values divided by."""
        if not 0 < value < math.inf:
            raise WeightError(f"{name} is {value}; a scale is a positive number")
        self.scales = (value, self.scales[1]) if name == "k_scale" else (self.scales[0], value)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch) -> Tensor:
        """q [T, H, D], k [T, K, D], v [T, K, D'] -> [T, H * D']."""
        k_cache, v_cache = batch.kv[self.layer_id]
        metadata = batch.attention[batch.group_of_layer[self.layer_id]]
        self.ops.write_kv(k, v, k_cache, v_cache, metadata.slot_mapping, *self._scales_for(k_cache))
        return self._attend(q, k_cache, v_cache, metadata)

    def rotated(self, q: Tensor, k: Tensor, v: Tensor, cos_sin: tuple[Tensor, Tensor], batch: ForwardBatch) -> Tensor:
        """The same of q and k that are still to be turned: with the write in one, where the platform has that."""
        fused = self.ops.rotary_and_write_kv
        if fused is None:
            q, k = self.ops.rotary(q, k, *cos_sin)
            return self(q, k, v, batch)
        k_cache, v_cache = batch.kv[self.layer_id]
        metadata = batch.attention[batch.group_of_layer[self.layer_id]]
        slots, scales = metadata.slot_mapping, self._scales_for(k_cache)
        return self._attend(fused(q, k, v, *cos_sin, k_cache, v_cache, slots, *scales), k_cache, v_cache, metadata)

    def _attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        rules = self.facts.scale, self.facts.window, self.facts.softcap
        return self.ops.attention(q, k_cache, v_cache, metadata, *rules, *self._scales_for(k_cache)).flatten(1)

    def _scales_for(self, cache: Tensor) -> tuple[()] | tuple[KVScales]:
        """What the ops are given beside the tensors: only 8-bit caches come with scales."""
        return () if cache.itemsize > 1 or self.scales == UNSCALED else (self.scales,)


class SelfAttention(Layer):
    """Projections, optional q/k norm, rotation, attention. q, k and v are row shards of one weight.

    The q/k norms go over each head, or with `norm_all_heads` over all heads of a token together (OLMoE).
    """

    def __init__(
        self,
        context: BuildContext,
        layer_id: int,
        facts: AttentionFacts,
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm: tuple[RMSNorm, RMSNorm] | None = None,
        norm_all_heads: bool = False,
    ) -> None:
        self.facts = facts
        self.qkv = Linear(context, facts.hidden_size, facts.q_rows + 2 * facts.kv_rows, bias=qkv_bias)
        self.out = Linear(context, facts.q_rows, facts.hidden_size, bias=out_bias)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if qk_norm is not None:
            self.q_norm, self.k_norm = qk_norm
        self.norm_all_heads = norm_all_heads
        self.attention = Attention(context, layer_id, facts)

    def __call__(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], batch: ForwardBatch) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        facts = self.facts
        heads = self.qkv(x).view(x.shape[0], facts.num_heads + 2 * facts.num_kv_heads, facts.head_size)
        q, k, v = heads.split_with_sizes((facts.num_heads, facts.num_kv_heads, facts.num_kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            if self.norm_all_heads:
                q, k = self.q_norm(q.flatten(1)).view_as(q), self.k_norm(k.flatten(1)).view_as(k)
            else:
                q, k = self.q_norm(q), self.k_norm(k)
        return self.out(self.attention.rotated(q, k, v, cos_sin, batch))


def kv_layout(layers: Sequence[AttentionFacts]) -> KVLayout:
    """One KV group for the layers that see everything ("full", first), one per window ("sliding_<w>")."""
    windows = sorted({facts.window for facts in layers}, key=lambda w: (w is not None, w or 0))
    groups = tuple(
        KVGroup(
            name="full" if window is None else f"sliding_{window}",
            layer_ids=tuple(i for i, facts in enumerate(layers) if facts.window == window),
            window=window,
        )
        for window in windows
    )
    return KVLayout(
        groups=groups,
        layers=tuple(
            KVLayer(
                layer_id=i,
                num_kv_heads=facts.num_kv_heads,
                head_size=facts.head_size,
                value_head_size=facts.value_head_size,
            )
            for i, facts in enumerate(layers)
        ),
    )
