"""Puts parts of an attention together, in the order of their keys. Called on the worker thread; pure."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def merge(
    highest: tl.tensor, total: tl.tensor, values: tl.tensor, highest2: tl.tensor, total2: tl.tensor, values2: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Scores [N], sums [N] and weighted values [N, D] of two parts -> of both. A part without a visible key changes nothing.

    The fused products are written out: the compiler could round them in one kernel and not in another.
    """
    now = tl.maximum(highest, highest2)
    finite = tl.where(now == float("-inf"), 0.0, now)
    shrink, shrink2 = tl.exp2(highest - finite), tl.exp2(highest2 - finite)
    total = tl.fma(total, shrink, total2 * shrink2)
    wide = tl.broadcast_to(shrink[:, None], values.shape)
    values = tl.fma(values, wide, values2 * shrink2[:, None])
    return now, total, values


@triton.jit
def merge_kernel(
    parts: tl.tensor,
    sums: tl.tensor,
    out: tl.tensor,
    out_scale: float,
    HEADS: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """Program (token, head)."""
    flat = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    column = tl.arange(0, VALUE_BLOCK)[None, :]
    one = tl.zeros([1], dtype=tl.int32)
    highest = tl.full([1], float("-inf"), dtype=tl.float32)
    total = tl.zeros([1], dtype=tl.float32)
    values = tl.zeros([1, VALUE_BLOCK], dtype=tl.float32)
    for split in range(SPLITS):
        place = flat * SPLITS + split
        highest2 = tl.load(sums + place * 2 + one)
        total2 = tl.load(sums + place * 2 + 1 + one)
        values2 = tl.load(parts + place * VALUE_SIZE + column, mask=column < VALUE_SIZE, other=0.0)
        highest, total, values = merge(highest, total, values, highest2, total2, values2)
    result = values / tl.where(total > 0, total, 1.0)[:, None] * out_scale
    tl.store(out + flat * VALUE_SIZE + column, result.to(out.dtype.element_ty), mask=column < VALUE_SIZE)
