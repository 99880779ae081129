"""Transform: the smallest set of best tokens whose probability reaches p (arXiv:1904.09751). Owns nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from infer.engine.sampling.ranking import best_values, keep_best
from infer.engine.sampling.row import SamplingRow

PREFIX = 1024
"""Best tokens summed at first; only a flat distribution needs more to reach p."""


def apply(logits: Tensor, index: Sequence[int], rows: Sequence[SamplingRow]) -> None:
    """In place on rows `index` of float32 [M, V]: a token stays while the tokens before it, best first (ties by
    lowest id), sum to less than p. The best always stays."""
    chosen = logits[list(index)]
    limits = torch.tensor([rows[i].spec.top_p for i in index], dtype=torch.float64, device=logits.device)
    probabilities = torch.softmax(chosen, dim=-1)
    thresholds, counts = nucleus(probabilities, limits)
    keep_best(chosen, probabilities, thresholds, counts)
    logits[list(index)] = chosen


def nucleus(probabilities: Tensor, limits: Tensor) -> tuple[Tensor, Tensor]:
    """(probabilities [M, V], limits [M] double) -> the probability of the last token kept, and how many are kept."""
    ordered = best_values(probabilities, probabilities.shape[-1])
    counts = _count(ordered[:, :PREFIX], limits)
    for row in (counts == PREFIX).nonzero().flatten().tolist():
        counts[row] = _count(ordered[row : row + 1], limits[row : row + 1])[0]
    return ordered.gather(-1, counts[:, None] - 1)[:, 0], counts


def _count(ordered: Tensor, limits: Tensor) -> Tensor:
    before = ordered.cumsum(dim=-1, dtype=torch.float64).sub_(ordered)
    return (before < limits[:, None]).sum(dim=-1).clamp_(min=1)
