"""Best values of a row; equal values count in token-id order. Runs in the worker thread; owns nothing.

Every result depends on its own row alone, never on what it is batched with.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

SORT_FROM = 256
"""On CPU, NumPy's vector sort of a whole row is no slower than a top-k of this many."""


def argmax(values: Tensor) -> list[int]:
    """(values [M, V]) -> the id of the best value of each row; of equal ones the lowest."""
    if values.device.type == "cpu":  # ten times as fast as torch's
        ids: list[int] = values.numpy().argmax(axis=-1).tolist()
        return ids
    return values.argmax(dim=-1).tolist()


def best_of_rows(values: Tensor) -> tuple[list[int], list[float]]:
    """(values [M, V]) -> the id of the best value of each row, of equal ones the lowest, and that value: NaN where a row
    holds one, for NaN counts as the best."""
    ids = argmax(values)
    return ids, values.gather(-1, torch.tensor(ids, device=values.device)[:, None])[:, 0].tolist()


def best_values(values: Tensor, k: int) -> Tensor:
    """(values [M, V], k <= V) -> the k largest of each row, best first."""
    if k < min(SORT_FROM, values.shape[-1]):
        return values.topk(k, dim=-1).values
    if values.device.type == "cpu":
        return torch.from_numpy(np.sort(values.numpy(), axis=-1)).flip(-1)[:, :k]
    return values.sort(dim=-1, descending=True).values[:, :k]


def best_ids(values: Tensor, k: int) -> Tensor:
    """(values [M, V], k <= V) -> ids [M, k] of the k largest of each row, best first, of equal ones the lowest first.

    `torch.topk` leaves open the order of equal values, and which of them it keeps at the border.
    """
    if k >= values.shape[-1]:
        return values.sort(dim=-1, descending=True, stable=True).indices
    best, ids = values.topk(k + 1, dim=-1)
    tied = ((best[:, k - 1] == best[:, k]) & (best[:, k] > float("-inf"))).nonzero().flatten()
    ids, by_id = ids[:, :k].sort(dim=-1)
    by_value = best[:, :k].gather(-1, by_id).sort(dim=-1, descending=True, stable=True).indices
    ids = ids.gather(-1, by_value)
    if len(tied):
        ids[tied] = values[tied].sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return ids


def keep_best(logits: Tensor, scores: Tensor, thresholds: Tensor, counts: Tensor) -> None:
    """In place: of each row of logits [M, V] the `counts` [M] ids with the best scores [M, V] stay, the rest become -inf.

    `thresholds` [M] holds the score of the last one kept. Of equal scores at the border the lowest ids stay.
    """
    kept = scores >= thresholds[:, None]
    surplus = (kept.sum(dim=-1) > counts) & (thresholds > float("-inf"))
    for row in surplus.nonzero().flatten().tolist():
        equal = scores[row] == thresholds[row]
        room = counts[row] - (scores[row] > thresholds[row]).sum()
        kept[row] &= ~equal | (equal.cumsum(dim=-1) <= room)
    logits.masked_fill_(kept.logical_not_(), float("-inf"))
