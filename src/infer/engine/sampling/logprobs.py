"""Log-probability, rank and best alternatives of chosen tokens. Runs in the worker thread; owns nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from infer.engine.sampling.ranking import best_ids
from infer.engine.step import PositionLogprobs


def position_logprobs(
    logits: Tensor, chosen: Sequence[int], top: Sequence[int], *, normalise: bool
) -> list[PositionLogprobs]:
    """(logits float32 [M, V], chosen id and number of alternatives per row) -> one entry per row.

    `normalise` takes the log-softmax; otherwise the values are the logits themselves. Rank 1 is the best token; equal
    logits share a rank. Alternatives that cannot be sampled (-inf) are left out.
    """
    ids = torch.tensor(list(chosen), dtype=torch.int64, device=logits.device)[:, None]
    values = torch.log_softmax(logits, dim=-1) if normalise else logits
    ranks = ((logits > logits.gather(-1, ids)).sum(dim=-1) + 1).tolist()
    chosen_values = values.gather(-1, ids)[:, 0].tolist()
    most = min(max(top, default=0), logits.shape[-1])
    if most == 0:
        return [PositionLogprobs(*entry) for entry in zip(chosen, chosen_values, ranks, strict=True)]
    top_ids = best_ids(logits, most)
    top_values = values.gather(-1, top_ids).tolist()
    return [
        PositionLogprobs(token_id, value, rank, _pairs(row_ids[:k], row_values[:k]))
        for token_id, value, rank, row_ids, row_values, k in zip(
            chosen, chosen_values, ranks, top_ids.tolist(), top_values, top, strict=True
        )
    ]


def _pairs(ids: list[int], values: list[float]) -> tuple[tuple[int, float], ...]:
    return tuple((i, v) for i, v in zip(ids, values, strict=True) if v != -math.inf)
