"""Transform: frequency and presence penalties over the output tokens, as in the OpenAI API. Owns nothing."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from infer.engine.sampling.row import SamplingRow


def apply(logits: Tensor, index: Sequence[int], rows: Sequence[SamplingRow]) -> None:
    """In place on rows `index` of float32 [M, V]: minus count * frequency, then minus presence for every id in the output."""
    for i in index:
        row = rows[i]
        if row.output_counts is not None:
            logits[i] -= row.output_counts * row.spec.frequency_penalty
            logits[i] -= (row.output_counts > 0) * row.spec.presence_penalty
