"""Routing and experts in plain torch: tokens are grouped by expert, so the loop is over the experts that were chosen.

Called on the worker thread; a router writes into the tap it is given, everything else is pure.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from infer.backends.reference.activation import silu_and_mul
from infer.backends.reference.linear import linear
from infer.backends.reference.scratch import Scratch
from infer.plugins.platform import Routing

SMALLEST_SUM = 1e-20
"""Added to a sum of weights before dividing: sigmoid scores can all be zero. Nothing to a sum of softmax scores."""


def topk_router(
    logits: Tensor,
    rule: Routing,
    bias: Tensor | None,
    tap: Tensor | None,
    sigmoid: Callable[[Tensor], Tensor] = torch.sigmoid,
) -> tuple[Tensor, Tensor]:
    """(logits [T, E], rule, bias [E] or None, tap) -> (weights [T, K] fp32, ids [T, K]); see `plugins.platform.Ops`."""
    logits = logits.float()
    if rule.scoring == "top_k_softmax":
        chosen, ids = largest(logits, rule.top_k)
        weights = chosen.softmax(-1)
    else:
        scores = logits.softmax(-1) if rule.scoring == "softmax" else sigmoid(logits)
        ranking = scores if bias is None else scores + bias
        if rule.num_groups > 1:
            ranking = _within_best_groups(ranking, rule)
        ids = largest(ranking, rule.top_k)[1]
        weights = scores.gather(1, ids)
    if rule.renormalize:
        weights = weights / (_row_sums(weights) + SMALLEST_SUM)
    if rule.scale != 1.0:
        weights = weights * rule.scale
    if tap is not None:
        tap[: ids.shape[0]].copy_(ids)
    return weights, ids


def largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """[T, E] -> values and ids [T, count], descending; of equal ones the lower id first, which topk leaves to chance."""
    values, ids = scores.sort(dim=-1, descending=True, stable=True)
    return values[:, :count], ids[:, :count]


def _row_sums(weights: Tensor) -> Tensor:
    """[T, K] -> [T, 1], added from left to right: the order in which torch's sum adds depends on T."""
    total = weights[:, :1]
    for k in range(1, weights.shape[1]):
        total = total + weights[:, k : k + 1]
    return total


def _within_best_groups(ranking: Tensor, rule: Routing) -> Tensor:
    """Scores [T, E] with -inf outside of each token's best groups."""
    grouped = ranking.view(ranking.shape[0], rule.num_groups, ranking.shape[1] // rule.num_groups)
    best = grouped.amax(-1) if rule.group_score == "max" else grouped.topk(2, dim=-1).values.sum(-1)
    groups = largest(best, rule.top_groups)[1]
    outside = torch.ones_like(best, dtype=torch.bool).scatter_(1, groups, False)
    return grouped.masked_fill(outside.unsqueeze(-1), -torch.inf).flatten(1)


def moe(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, scratch: Scratch) -> Tensor:
    """(x [T, N], ids [T, K], weights [T, K], gate_up [E, 2I, N], down [E, N, I]) -> [T, N]."""
    num_tokens, top_k = ids.shape
    chosen, order = ids.flatten().sort(stable=True)
    outputs = scratch.new(x, (num_tokens * top_k, x.shape[1]))
    # The worst case, which is what is planned: every token chooses the same expert.
    counts = [num_tokens] if scratch.dry else torch.bincount(chosen).tolist()
    start = 0
    for expert, count in enumerate(counts):
        if count == 0:
            continue
        places = order[start : start + count]
        result = _expert(x, places // top_k, gate_up[expert], down[expert], scratch)
        if not scratch.dry:
            outputs.index_copy_(0, places, result)
        del result  # before the next one is made
        start += count
    by_choice = outputs.view(num_tokens, top_k, x.shape[1])
    out = scratch.new(x, x.shape)
    for rows in scratch.tiles(out):
        total = by_choice[rows, 0] * weights[rows, :1]  # fp32, because the weights are
        for k in range(1, top_k):
            total.addcmul_(by_choice[rows, k], weights[rows, k : k + 1])
        out[rows] = total
    return out


def _expert(x: Tensor, tokens: Tensor, gate_up: Tensor, down: Tensor, scratch: Scratch) -> Tensor:
    """One expert's result for some tokens of x."""
    own = scratch.place((len(tokens), x.shape[1]), x.dtype)
    if own is None:
        own = x.index_select(0, tokens)
    elif not scratch.dry:
        torch.index_select(x, 0, tokens, out=own)
    return linear(silu_and_mul(linear(own, gate_up, None, scratch), scratch), down, None, scratch)
