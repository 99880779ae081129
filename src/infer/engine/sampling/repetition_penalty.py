"""Transform: ids of the prompt or the output become less likely (CTRL, arXiv:1909.05858). Owns nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from infer.engine.sampling.row import SamplingRow
from infer.engine.sampling.token_counts import elements


def apply(logits: Tensor, index: Sequence[int], rows: Sequence[SamplingRow]) -> None:
    """In place on rows `index` of float32 [M, V]: positive logits are divided by the penalty, others multiplied."""
    flat, _, row = elements(index, [rows[i].token_counts for i in index], logits.shape[-1], logits.device)
    settings = torch.tensor([rows[i].spec.repetition_penalty for i in index], dtype=torch.float32)
    penalty = settings.to(logits.device)[row]
    values = logits.view(-1)[flat]
    logits.view(-1)[flat] = torch.where(values > 0, values / penalty, values * penalty)
