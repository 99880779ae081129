"""Transform: only the k best tokens stay. Runs in the worker thread; owns nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from infer.engine.sampling.ranking import best_values, keep_best
from infer.engine.sampling.row import SamplingRow


def apply(logits: Tensor, index: Sequence[int], rows: Sequence[SamplingRow]) -> None:
    """In place on rows `index` of float32 [M, V]. Exactly min(k, V) stay: of equal logits at the border the lowest
    ids, so that k = 1 is greedy (transformers would keep all of them)."""
    width = logits.shape[-1]
    index = [i for i in index if rows[i].spec.top_k < width]
    if not index:
        return
    chosen = logits[index]
    sizes = [rows[i].spec.top_k for i in index]
    counts = torch.tensor(sizes, dtype=torch.int64, device=logits.device)
    thresholds = best_values(chosen, max(sizes)).gather(-1, counts[:, None] - 1)[:, 0]
    keep_best(chosen, chosen, thresholds, counts)
    logits[index] = chosen
