"""Transform: only the allowed ids stay. Runs in the worker thread; owns nothing."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from infer.engine.sampling.row import SamplingRow


def apply(logits: Tensor, index: Sequence[int], rows: Sequence[SamplingRow]) -> None:
    """In place on rows `index` of float32 [M, V]: everything outside `allowed_token_ids` becomes -inf."""
    for i in index:
        allowed = rows[i].allowed
        if allowed is not None:
            kept = logits[i, allowed]
            logits[i] = float("-inf")
            logits[i, allowed] = kept
