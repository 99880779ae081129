"""Transform: frequency and presence penalties over the output tokens, as in the OpenAI API. Owns nothing."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from infer.engine.sampling.row import SamplingRow


def apply(logits: Tensor, index: Sequence[int], rows: Sequence[SamplingRow]) -> None:
    """In place on rows `index` of float32 [M, V]: minus count * frequency, minus presence for every id in the output."""
    for i in index:
        sampled = rows[i].counts
        if sampled is not None:
            spec = rows[i].spec
            frequency = sampled.counts * spec.frequency_penalty
            presence = (sampled.counts > 0) * spec.presence_penalty
            logits[i, sampled.ids] = logits[i, sampled.ids] - frequency - presence
