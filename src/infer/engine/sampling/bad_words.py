"""Transform: forbidden token sequences cannot be completed. Runs in the worker thread; owns nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from infer.engine.sampling.row import SamplingRow


def apply(logits: Tensor, index: Sequence[int], rows: Sequence[SamplingRow]) -> None:
    """In place on rows `index` of float32 [M, V]: a word's last id becomes -inf where the ids before it are the
    row's tail (prompt included); words of one id always."""
    for i in index:
        masked = completed_by(rows[i])
        if masked:
            logits[i, torch.tensor(masked, dtype=torch.int64, device=logits.device)] = float("-inf")


def completed_by(row: SamplingRow) -> list[int]:
    """The ids that would complete a bad word now."""
    tail = row.tail
    return [
        word[-1]
        for word in row.spec.bad_words
        if word and (len(word) == 1 or tail[-(len(word) - 1) :] == list(word[:-1]))
    ]
