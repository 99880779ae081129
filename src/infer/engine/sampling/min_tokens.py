"""Transform: EOS and stop ids cannot be sampled before `min_tokens` outputs. Runs in the worker thread; owns nothing."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from infer.engine.sampling.row import SamplingRow


def apply(logits: Tensor, index: Sequence[int], rows: Sequence[SamplingRow]) -> None:
    """In place on rows `index` of float32 [M, V]."""
    for i in index:
        row = rows[i]
        if row.masked_until_min is not None and row.output_position < row.spec.min_tokens:
            logits[i, row.masked_until_min] = float("-inf")
