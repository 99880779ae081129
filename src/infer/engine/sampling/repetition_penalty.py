"""Transform: ids of the prompt or the output become less likely (CTRL, arXiv:1909.05858). Owns nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from infer.engine.sampling.row import SamplingRow


def apply(logits: Tensor, index: Sequence[int], rows: Sequence[SamplingRow]) -> None:
    """In place on rows `index` of float32 [M, V]: positive logits are divided by the penalty, others multiplied."""
    for i in index:
        seen = rows[i].counts
        if seen is not None:
            penalty = rows[i].spec.repetition_penalty
            values = logits[i, seen.ids]
            logits[i, seen.ids] = torch.where(values > 0, values / penalty, values * penalty)
