"""Transform: divide by the temperature. Runs in the worker thread; owns nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from infer.engine.sampling.row import SamplingRow


def apply(logits: Tensor, index: Sequence[int], rows: Sequence[SamplingRow]) -> None:
    """In place on rows `index` of float32 [M, V]."""
    values = torch.tensor([rows[i].spec.temperature for i in index], dtype=torch.float32, device=logits.device)
    if len(index) == len(logits):
        logits /= values[:, None]
    else:
        logits[list(index)] = logits[list(index)] / values[:, None]
