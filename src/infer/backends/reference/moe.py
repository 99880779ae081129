"""Routing and experts in plain torch: tokens are grouped by expert, so the loop is over the experts that were chosen.

Called on the worker thread; a router writes into the tap it is given, everything else is pure.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from infer.backends.reference.activation import silu_and_mul
from infer.plugins.platform import Routing

SMALLEST_SUM = 1e-20
"""Added to a sum of weights before dividing: sigmoid scores can all be zero. Nothing to a sum of softmax scores."""


def topk_router(logits: Tensor, rule: Routing, bias: Tensor | None, tap: Tensor | None) -> tuple[Tensor, Tensor]:
    """(logits [T, E], rule, bias [E] or None, tap) -> (weights [T, K] fp32, ids [T, K]); see `plugins.platform.Ops`."""
    logits = logits.float()
    if rule.scoring == "top_k_softmax":
        chosen, ids = logits.topk(rule.top_k, dim=-1)
        weights = chosen.softmax(-1)
    else:
        scores = logits.softmax(-1) if rule.scoring == "softmax" else logits.sigmoid()
        ranking = scores if bias is None else scores + bias
        if rule.num_groups > 1:
            ranking = _within_best_groups(ranking, rule)
        ids = ranking.topk(rule.top_k, dim=-1).indices
        weights = scores.gather(1, ids)
    if rule.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + SMALLEST_SUM)
    if rule.scale != 1.0:
        weights = weights * rule.scale
    if tap is not None:
        tap[: ids.shape[0]].copy_(ids)
    return weights, ids


def _within_best_groups(ranking: Tensor, rule: Routing) -> Tensor:
    """Scores [T, E] with -inf outside of each token's best groups."""
    grouped = ranking.view(ranking.shape[0], rule.num_groups, ranking.shape[1] // rule.num_groups)
    best = grouped.amax(-1) if rule.group_score == "max" else grouped.topk(2, dim=-1).values.sum(-1)
    groups = best.topk(rule.top_groups, dim=-1).indices
    outside = torch.ones_like(best, dtype=torch.bool).scatter_(1, groups, False)
    return grouped.masked_fill(outside.unsqueeze(-1), -torch.inf).flatten(1)


def moe(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """(x [T, N], ids [T, K], weights [T, K], gate_up [E, 2I, N], down [E, N, I]) -> [T, N]."""
    num_tokens, top_k = ids.shape
    chosen, order = ids.flatten().sort(stable=True)
    outputs = x.new_empty(num_tokens * top_k, x.shape[1])
    start = 0
    for expert, count in enumerate(torch.bincount(chosen).tolist()):
        if count == 0:
            continue
        places = order[start : start + count]
        inner = silu_and_mul(F.linear(x.index_select(0, places // top_k), gate_up[expert]))
        outputs.index_copy_(0, places, F.linear(inner, down[expert]))
        start += count
    by_choice = outputs.view(num_tokens, top_k, x.shape[1])
    total = by_choice[:, 0] * weights[:, :1]  # fp32, because the weights are
    for k in range(1, top_k):
        total.addcmul_(by_choice[:, k], weights[:, k : k + 1])
    return total.to(x.dtype)
