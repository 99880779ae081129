"""A router's choice of experts: scores, groups, top k and weights of one token in one program.

Called on the worker thread; writes into the tap it is given, everything else is pure.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from infer.backends.cuda.launch import Launch, dense_rows, power_of_two
from infer.plugins.platform import Routing

SCORING = {"softmax": 0, "top_k_softmax": 1, "sigmoid": 2}
LEAST: tl.constexpr = tl.constexpr(-(2**63))
SMALLEST_SUM: tl.constexpr = tl.constexpr(1e-20)
"""Added to a sum of weights before dividing: sigmoid scores can all be zero."""


@triton.jit
def ranked(score: tl.tensor, item: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """Scores and items -> int64 in the order of a choice: the higher score, of equal ones the lower item; NaN is highest."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    bits = tl.where(score != score, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return (bits.to(tl.int64) << 32) | (SIZE - 1 - item).to(tl.int64)


@triton.jit
def score_of(rank: tl.tensor) -> tl.tensor:
    bits = (rank >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def best_groups(
    ranks: tl.tensor,
    expert: tl.tensor,
    exists: tl.tensor,
    EXPERTS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP2: tl.constexpr,
) -> tl.tensor:
    """Which experts are in the best groups. A group counts as its best expert, or as its two best together."""
    group = expert // (EXPERTS // GROUPS)
    slot = tl.arange(0, GROUPS_BLOCK)
    scores = tl.full([GROUPS_BLOCK], float("-inf"), dtype=tl.float32)
    for number in range(GROUPS):
        own = tl.where(exists & (group == number), ranks, LEAST)
        first = tl.max(own, axis=0)
        score = score_of(first)
        if TOP2:
            score += score_of(tl.max(tl.where(own == first, LEAST, own), axis=0))
        scores = tl.where(slot == number, score, scores)
    order = tl.where(slot < GROUPS, ranked(scores, slot, GROUPS_BLOCK), LEAST)
    allowed = group < 0
    for _ in range(TOP_GROUPS):
        best = tl.max(order, axis=0)
        allowed = allowed | (group == GROUPS_BLOCK - 1 - (best & 0x7FFFFFFF).to(tl.int32))
        order = tl.where(order == best, LEAST, order)
    return allowed


@triton.jit
def router_kernel(
    logits: tl.tensor,
    bias: tl.tensor,
    tap: tl.tensor,
    weights: tl.tensor,
    ids: tl.tensor,
    logits_row: int,
    tap_row: int,
    scale: float,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    SCORING: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP2: tl.constexpr,
    BIAS: tl.constexpr,
    TAP: tl.constexpr,
) -> None:
    """Program: token."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    exists = expert < EXPERTS
    scores = tl.load(logits + token * logits_row + expert, mask=exists, other=float("-inf")).to(tl.float32)
    if SCORING == 0:
        powers = tl.exp(scores - tl.max(scores, axis=0))
        scores = powers / tl.sum(powers, axis=0)
    if SCORING == 2:
        scores = tl.sigmoid(scores)
    ranking = scores
    if BIAS:
        ranking += tl.load(bias + expert, mask=exists, other=0.0).to(tl.float32)
    ranks = tl.where(exists, ranked(ranking, expert, BLOCK), LEAST)
    if GROUPS > 1:
        allowed = best_groups(ranks, expert, exists, EXPERTS, GROUPS, GROUPS_BLOCK, TOP_GROUPS, TOP2)
        outside = ranked(tl.full([BLOCK], float("-inf"), dtype=tl.float32), expert, BLOCK)
        ranks = tl.where(allowed | (expert >= EXPERTS), ranks, outside)
    place = tl.arange(0, K_BLOCK)
    chosen = tl.zeros([K_BLOCK], dtype=tl.int32)
    found = tl.full([K_BLOCK], float("-inf"), dtype=tl.float32)
    for k in range(TOP_K):
        best = tl.max(ranks, axis=0)
        own = BLOCK - 1 - (best & 0x7FFFFFFF).to(tl.int32)
        chosen = tl.where(place == k, own, chosen)
        found = tl.where(place == k, tl.sum(tl.where(expert == own, scores, 0.0), axis=0), found)
        ranks = tl.where(ranks == best, LEAST, ranks)
    if SCORING == 1:
        powers = tl.exp(found - tl.max(found, axis=0))
        found = powers / tl.sum(powers, axis=0)
    if RENORMALIZE:
        found = found / (tl.sum(tl.where(place < TOP_K, found, 0.0), axis=0) + SMALLEST_SUM)
    mask = place < TOP_K
    tl.store(weights + token * TOP_K + place, found * scale, mask=mask)
    tl.store(ids + token * TOP_K + place, chosen.to(tl.int64), mask=mask)
    if TAP:
        tl.store(tap + token * tap_row + place, chosen.to(tap.dtype.element_ty), mask=mask)


def topk_router(
    launch: Launch, logits: Tensor, rule: Routing, bias: Tensor | None, tap: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(logits [T, E], rule, bias [E] or None, tap) -> (weights [T, K] fp32, ids [T, K]); see `plugins.platform.Ops`."""
    logits = dense_rows(logits)
    tokens, experts = logits.shape
    weights = torch.empty((tokens, rule.top_k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((tokens, rule.top_k), dtype=torch.int64, device=logits.device)
    dense_tap = tap is not None and tap.stride(-1) == 1
    biased = bias is not None and rule.scoring != "top_k_softmax"
    launch(
        router_kernel,
        (tokens,),
        logits,
        bias.contiguous() if bias is not None and biased else logits,
        tap if tap is not None and dense_tap else ids,
        weights,
        ids,
        logits.stride(0),
        tap.stride(0) if tap is not None and dense_tap else 0,
        rule.scale,
        EXPERTS=experts,
        BLOCK=power_of_two(experts),
        TOP_K=rule.top_k,
        K_BLOCK=power_of_two(rule.top_k),
        SCORING=SCORING[rule.scoring],
        RENORMALIZE=rule.renormalize,
        GROUPS=1 if rule.scoring == "top_k_softmax" else rule.num_groups,
        GROUPS_BLOCK=power_of_two(rule.num_groups),
        TOP_GROUPS=rule.top_groups,
        TOP2=rule.group_score == "top2_sum",
        BIAS=biased,
        TAP=dense_tap,
        num_warps=1 if experts <= 128 else 4,
        num_stages=1,
    )
    if tap is not None and not dense_tap:
        tap[:tokens].copy_(ids)
    return weights, ids
