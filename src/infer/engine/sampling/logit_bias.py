"""Transform: add the caller's bias to single tokens. Runs in the worker thread; owns nothing."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from infer.engine.sampling.row import SamplingRow


def apply(logits: Tensor, index: Sequence[int], rows: Sequence[SamplingRow]) -> None:
    """In place on rows `index` of float32 [M, V]. A masked token stays masked."""
    for i in index:
        row = rows[i]
        if row.bias_ids is not None and row.bias_values is not None:
            logits[i, row.bias_ids] += row.bias_values
