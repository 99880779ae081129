"""Transform: only the k best tokens stay. Runs in the worker thread; owns nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from infer.engine.sampling.ranking import keep_only, largest
from infer.engine.sampling.row import SamplingRow


def apply(logits: Tensor, index: Sequence[int], rows: Sequence[SamplingRow]) -> None:
    """In place on rows `index` of float32 [M, V]. Exactly min(k, V) stay: of equal logits at the border the lowest
    ids, so that k = 1 is greedy (transformers would keep all of them)."""
    width = logits.shape[-1]
    index = [i for i in index if rows[i].spec.top_k < width]
    if not index:
        return
    counts = torch.tensor([rows[i].spec.top_k for i in index], dtype=torch.int64, device=logits.device)
    chosen = logits[index]
    most = int(max(rows[i].spec.top_k for i in index))
    _, ids = largest(chosen, most)
    keep_only(chosen, ids, torch.arange(most, device=logits.device)[None, :] < counts[:, None])
    logits[index] = chosen
