"""Best values of a row, equal values in token-id order. Runs in the worker thread; owns nothing."""

from __future__ import annotations

import torch
from torch import Tensor


def largest(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(values [M, V], k <= V) -> the k largest of each row and their ids, both [M, k]; best first, ties by lowest id.

    `torch.topk` leaves the order of equal values open, and which of them it keeps at the border; both are decided
    here, so that the answer depends on the row alone.
    """
    width = values.shape[-1]
    if k >= width:
        best, ids = values.sort(dim=-1, descending=True, stable=True)
        return best[:, :k], ids[:, :k]
    best, ids = values.topk(k + 1, dim=-1)
    tied = (best[:, k - 1] == best[:, k]).nonzero().flatten()
    ids, by_id = ids[:, :k].sort(dim=-1)
    best, by_value = best[:, :k].gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, by_value)
    if len(tied):
        whole, order = values[tied].sort(dim=-1, descending=True, stable=True)
        best[tied], ids[tied] = whole[:, :k], order[:, :k]
    return best, ids


def keep_only(logits: Tensor, kept_ids: Tensor, kept: Tensor) -> None:
    """In place: of each row of logits [M, V] only the ids in kept_ids [M, k] where kept [M, k] is true stay finite."""
    mask = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    mask.scatter_(-1, kept_ids, kept)
    logits.masked_fill_(~mask, float("-inf"))
