"""Transform: repetition, frequency and presence penalties in one pass of the platform's own. Owns nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from infer.engine.sampling.row import SamplingRow
from infer.engine.sampling.token_counts import elements

FusedPenalties = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""`plugins.platform.Ops.penalties`."""


def apply(fused: FusedPenalties, logits: Tensor, index: Sequence[int], rows: Sequence[SamplingRow]) -> None:
    """In place on rows `index` of float32 [M, V]: `repetition_penalty`, then `output_penalties`. A row without one of them has
    settings that change nothing."""
    places, counts, settings = elements(index, [rows[i].token_counts for i in index], logits.shape[-1], logits.device)
    specs = [rows[i].spec for i in index]
    columns = (
        [spec.repetition_penalty for spec in specs],
        [spec.frequency_penalty for spec in specs],
        [spec.presence_penalty for spec in specs],
    )
    repetition, frequency, presence = torch.tensor(columns, dtype=torch.float32).to(logits.device)
    fused(logits, places, counts, settings, repetition, frequency, presence)
