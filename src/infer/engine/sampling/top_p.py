"""Transform: the smallest set of best tokens whose probability reaches p (arXiv:1904.09751). Owns nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from infer.engine.sampling.ranking import keep_only, largest
from infer.engine.sampling.row import SamplingRow

CANDIDATES = 256
"""Tokens tried before the whole vocabulary is sorted: a peaked distribution reaches p well within."""


def apply(logits: Tensor, index: Sequence[int], rows: Sequence[SamplingRow]) -> None:
    """In place on rows `index` of float32 [M, V]: a token stays while the tokens before it, best first (ties by
    lowest id), sum to less than p. The best always stays."""
    chosen = logits[list(index)]
    limits = torch.tensor([rows[i].spec.top_p for i in index], dtype=torch.float64, device=logits.device)
    probabilities = torch.softmax(chosen, dim=-1)
    open_rows = torch.arange(len(index), device=logits.device)
    for width in (CANDIDATES, logits.shape[-1]):
        some = probabilities[open_rows]
        best, ids = largest(some, min(width, logits.shape[-1]))
        sums = best.cumsum(dim=-1, dtype=torch.float64)
        kept = (sums - best) < limits[open_rows, None]
        kept[:, 0] = True
        done = ~kept[:, -1] if width < logits.shape[-1] else torch.ones_like(kept[:, -1])
        ready = done.nonzero().flatten()
        if len(ready):
            part = chosen[open_rows[ready]]
            keep_only(part, ids[ready], kept[ready])
            chosen[open_rows[ready]] = part
        open_rows = open_rows[~done]
        if not len(open_rows):
            break
    logits[list(index)] = chosen
