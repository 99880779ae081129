"""Transform: frequency and presence penalties over the output tokens, as in the OpenAI API. Owns nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from infer.engine.sampling.row import SamplingRow
from infer.engine.sampling.token_counts import elements


def apply(logits: Tensor, index: Sequence[int], rows: Sequence[SamplingRow]) -> None:
    """In place on rows `index` of float32 [M, V]: minus count * frequency, minus presence for every id in the output."""
    flat, count, row = elements(index, [rows[i].token_counts for i in index], logits.shape[-1], logits.device)
    settings = [(rows[i].spec.frequency_penalty, rows[i].spec.presence_penalty) for i in index]
    frequency, presence = torch.tensor(settings, dtype=torch.float32).to(logits.device)[row].unbind(dim=-1)
    logits.view(-1)[flat] = logits.view(-1)[flat] - count * frequency - (count > 0) * presence
