"""Temperature, top-k, top-p, min-p and the draw of one row in one program, without sorting it.

Called on the worker thread; pure. Weights are counted as integers, whose sum has one value in any order: what a row draws
depends on nothing else. Thresholds are found by bisection over the bits of a logit, seven pivots to a pass.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from infer.backends.cuda.launch import Launch

BLOCK = 2048
SMALL_BLOCK = 256
ONE: tl.constexpr = tl.constexpr(float(2**43))
"""The weight of the best token; 2**19 of them still have a sum below 2**63. Less than 2**-43 of it counts as nothing."""
PASSES: tl.constexpr = tl.constexpr(11)
"""Of three bits each: the 33 bits of the range of a 32-bit key."""


@triton.jit
def key_of(logit: tl.tensor) -> tl.tensor:
    """int64 in the order of fp32, with one key for both zeros."""
    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def weight_of(logit: tl.tensor, highest: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """exp((logit - highest) / temperature) in units of 1 / ONE."""
    return (tl.exp((logit - highest) / temperature) * ONE).to(tl.int64)


@triton.jit
def threshold(
    row: tl.tensor,
    width: int,
    highest: tl.tensor,
    temperature: tl.tensor,
    wanted: tl.tensor,
    MASS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The highest key such that the tokens at or above it reach `wanted`, tokens or weight (which all of them together
    reach), and what those above it have."""
    low = tl.full([], -(2**31), dtype=tl.int64)
    size = tl.full([], 2**33, dtype=tl.int64)
    above = tl.zeros([], dtype=tl.int64)
    pivot = tl.arange(0, 8)
    for _ in range(PASSES):
        size = size // 8
        sums = tl.zeros([8, BLOCK], dtype=tl.int64)
        for start in range(0, width, BLOCK):
            at = start + tl.arange(0, BLOCK)
            logit = tl.load(row + at, mask=at < width, other=float("-inf"))
            amount = weight_of(logit, highest, temperature) if MASS else (at < width).to(tl.int64)
            reached = key_of(logit)[None, :] >= (low + pivot * size)[:, None]
            sums += tl.where(reached, amount[None, :], 0)
        totals = tl.sum(sums, axis=1)
        # The pivots rise and their totals fall: the last one that still reaches what is wanted begins the next range.
        best = tl.maximum(tl.sum((totals >= wanted).to(tl.int32), axis=0) - 1, 0)
        above = tl.where(best < 7, tl.sum(tl.where(pivot == best + 1, totals, 0), axis=0), above)
        low += best * size
    return low, above


@triton.jit
def draw_kernel(
    logits: tl.tensor,
    rows: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    numbers: tl.tensor,
    ids: tl.tensor,
    width: int,
    logits_row: int,
    BLOCK: tl.constexpr,
) -> None:
    """Program: draw."""
    draw = tl.program_id(0)
    row = logits + tl.load(rows + draw) * logits_row
    temperature = tl.load(temperatures + draw)
    top_k, top_p, min_p = tl.load(top_ks + draw), tl.load(top_ps + draw), tl.load(min_ps + draw)
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        best = tl.maximum(best, tl.load(row + start + lane, mask=start + lane < width, other=float("-inf")))
    highest = tl.max(best, axis=0)
    # Kept are the keys above `border` and the first `ties` ids that have it.
    border = tl.full([], -(2**40), dtype=tl.int64)
    ties = tl.zeros([], dtype=tl.int64)
    if (top_k > 0) & (top_k < width):
        border, above = threshold(row, width, highest, temperature, top_k, False, BLOCK)
        ties = top_k - above
    if top_p < 1.0:
        sums = tl.zeros([BLOCK], dtype=tl.int64)
        at_border = tl.zeros([BLOCK], dtype=tl.int64)
        for start in range(0, width, BLOCK):
            logit = tl.load(row + start + lane, mask=start + lane < width, other=float("-inf"))
            weight = weight_of(logit, highest, temperature)
            sums += tl.where(key_of(logit) > border, weight, 0)
            at_border = tl.maximum(at_border, tl.where(key_of(logit) == border, weight, 0))
        total = tl.sum(sums, axis=0) + ties * tl.max(at_border, axis=0)
        # The best token always stays; rounding up, the set reaches its share.
        wanted = tl.maximum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), 1)
        key, above = threshold(row, width, highest, temperature, tl.minimum(wanted, total), True, BLOCK)
        each = tl.zeros([BLOCK], dtype=tl.int64)
        for start in range(0, width, BLOCK):
            logit = tl.load(row + start + lane, mask=start + lane < width, other=float("-inf"))
            weight = weight_of(logit, highest, temperature)
            each = tl.maximum(each, tl.where(key_of(logit) == key, weight, 0))
        one = tl.maximum(tl.max(each, axis=0), 1)
        needed = (tl.minimum(wanted, total) - above + one - 1) // one
        ties = tl.where(key > border, needed, tl.where(key == border, tl.minimum(needed, ties), ties))
        border = tl.maximum(border, key)
    # Two passes over what is left: its weight, then the place of the number in it.
    total = tl.zeros([], dtype=tl.int64)
    target = tl.zeros([], dtype=tl.int64)
    found = tl.full([], -1, dtype=tl.int64)
    for search in range(2):
        before = tl.zeros([], dtype=tl.int64)
        equal = tl.zeros([], dtype=tl.int64)
        for start in range(0, width, BLOCK):
            at = start + lane
            logit = tl.load(row + at, mask=at < width, other=float("-inf"))
            weight = weight_of(logit, highest, temperature)
            key = key_of(logit)
            tied = key == border
            rank = equal + tl.cumsum(tied.to(tl.int64), axis=0)
            kept = (key > border) | (tied & (rank <= ties))
            kept = kept & (tl.exp((logit - highest) / temperature) >= min_p)
            weight = tl.where(kept, weight, 0)
            equal += tl.sum(tied.to(tl.int64), axis=0)
            here = tl.sum(weight, axis=0)
            if (search == 1) & (found < 0) & (before + here > target):
                passed = before + tl.cumsum(weight, axis=0) > target
                found = tl.min(tl.where(passed, at, 2147483647), axis=0).to(tl.int64)
            before += here
        if search == 0:
            total = before
            number = tl.load(numbers + draw)
            target = tl.minimum((number * total.to(tl.float64)).to(tl.int64), total - 1)
    tl.store(ids + draw, found)


def draw(
    launch: Launch,
    logits: Tensor,
    rows: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    number: Tensor,
) -> Tensor:
    """(logits [M, V] fp32, rows [D] int64, temperature [D] fp32, top_k [D] int64, top_p [D] fp64, min_p [D] fp32,
    number [D] fp64) -> ids [D] int64; see `plugins.platform.Ops`. V is at most 2**19."""
    width = logits.shape[1]
    if width > 2**19:
        raise ValueError(f"a vocabulary of {width} tokens; the draw counts weights of at most {2**19}")
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    ids = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    given = [one.contiguous() for one in (rows, temperature, top_k, top_p, min_p, number)]
    block = BLOCK if width > SMALL_BLOCK else SMALL_BLOCK
    launch(
        draw_kernel,
        (len(rows),),
        logits,
        *given,
        ids,
        width,
        logits.stride(0),
        BLOCK=block,
        num_warps=8 if block == BLOCK else 4,
        num_stages=1,
    )
    return ids
