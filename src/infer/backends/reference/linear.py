"""Products with a weight in plain torch. Called on the worker thread; pure."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from infer.backends.reference.scratch import Scratch


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, scratch: Scratch) -> Tensor:
    """(x [T, I], weight [N, I], bias [N] or None) -> [T, N] in x's dtype."""
    out = scratch.place((x.shape[0], weight.shape[0]), x.dtype)
    if out is None:
        return F.linear(x, weight, bias)
    if scratch.dry:
        return out
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)
