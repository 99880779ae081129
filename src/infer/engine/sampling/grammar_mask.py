"""Transform: only what the row's guide allows stays. Runs in the worker thread; owns nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from infer.engine.sampling.row import SamplingRow
from infer.errors import GrammarError


def apply(logits: Tensor, index: Sequence[int], rows: Sequence[SamplingRow]) -> None:
    """In place on rows `index` of float32 [M, V]: tokens without a bit in the guide's mask become -inf."""
    for i in index:
        guide = rows[i].guide
        if guide is None:
            continue
        if guide.failure is not None:
            raise GrammarError(guide.failure)
        if guide.mask is not None:
            forbidden = np.unpackbits(
                ~np.frombuffer(guide.mask, dtype=np.uint8), count=logits.shape[-1], bitorder="little"
            )
            logits[i].masked_fill_(torch.from_numpy(forbidden.view(np.bool_)).to(logits.device), float("-inf"))
