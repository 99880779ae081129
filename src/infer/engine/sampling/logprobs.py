"""Log-probability, rank and best alternatives of chosen tokens, and of given candidates. Runs in the worker thread; owns
nothing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from infer.engine.sampling.ranking import best_ids
from infer.engine.step import PositionLogprobs
from infer.types import LogprobsMode

NORMALISED: frozenset[LogprobsMode] = frozenset({"raw", "processed"})
"""Modes whose values are log-probabilities; those of the others are logits."""


def position_logprobs(
    logits: Tensor,
    chosen: Sequence[int],
    top: Sequence[int],
    *,
    normalise: bool,
    candidates: Sequence[Tensor | None] = (),
) -> list[PositionLogprobs]:
    """(logits float32 [M, V], chosen id and number of alternatives per row) -> one entry per row.

    `normalise` takes the log-softmax; otherwise the values are the logits themselves. Rank 1 is the best token; equal
    logits share a rank. Alternatives that cannot be sampled (-inf) are left out. `candidates` are ids (int64) to score,
    one tensor or None per row; empty: no row has any.
    """
    ids = torch.tensor(list(chosen), dtype=torch.int64, device=logits.device)[:, None]
    values = torch.log_softmax(logits, dim=-1) if normalise else logits
    ranks = ((logits > logits.gather(-1, ids)).sum(dim=-1) + 1).tolist()
    chosen_values = values.gather(-1, ids)[:, 0].tolist()
    entries = [PositionLogprobs(*entry) for entry in zip(chosen, chosen_values, ranks, strict=True)]
    most = min(max(top, default=0), logits.shape[-1])
    if most:
        top_ids = best_ids(logits, most)
        top_values = values.gather(-1, top_ids).tolist()
        for entry, row_ids, row_values, k in zip(entries, top_ids.tolist(), top_values, top, strict=True):
            entry.top = _pairs(row_ids[:k], row_values[:k])
    _score(values, candidates, entries)
    return entries


def _score(values: Tensor, candidates: Sequence[Tensor | None], entries: Sequence[PositionLogprobs]) -> None:
    """One gather for all rows; what leaves the device is a number per candidate."""
    scored = [(row, ids) for row, ids in enumerate(candidates) if ids is not None]
    if not scored:
        return
    sizes = [len(ids) for _, ids in scored]
    rows = torch.tensor([row for row, _ in scored]).repeat_interleave(torch.tensor(sizes)).to(values.device)
    found = iter(values[rows, torch.cat([ids for _, ids in scored])].tolist())
    for (row, _), size in zip(scored, sizes, strict=True):
        entries[row].candidates = tuple(itertools.islice(found, size))


def _pairs(ids: list[int], values: list[float]) -> tuple[tuple[int, float], ...]:
    return tuple((i, v) for i, v in zip(ids, values, strict=True) if v != -math.inf)
