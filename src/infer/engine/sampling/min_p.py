"""Transform: tokens less likely than min_p times the best one go (arXiv:2407.01082). Owns nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from infer.engine.sampling.row import SamplingRow


def apply(logits: Tensor, index: Sequence[int], rows: Sequence[SamplingRow]) -> None:
    """In place on rows `index` of float32 [M, V]. The best token always stays."""
    chosen = logits[list(index)]
    shares = torch.tensor([rows[i].spec.min_p for i in index], dtype=torch.float32, device=logits.device)
    probabilities = torch.softmax(chosen, dim=-1)
    limits = probabilities.amax(dim=-1, keepdim=True) * shares[:, None]
    logits[list(index)] = chosen.masked_fill_(probabilities < limits, float("-inf"))
