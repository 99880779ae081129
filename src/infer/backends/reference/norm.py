"""RMS norm in plain torch, alone and after a sum. Called on the worker thread; pure."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from infer.backends.reference.scratch import Scratch


def rms_norm(x: Tensor, weight: Tensor, eps: float, scratch: Scratch) -> Tensor:
    """(x [..., N], weight [N], eps) -> [..., N]; mean square, scaling and weight in fp32, one rounding at the end."""
    out = scratch.place(x.shape, x.dtype)
    if out is None:
        return _normed(x, weight, eps)
    for rows in scratch.tiles(out):
        out[rows] = _normed(x[rows], weight, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, scratch: Scratch) -> tuple[Tensor, Tensor]:
    """(x, residual, weight, eps) -> (rms_norm(x + residual), x + residual)."""
    total = scratch.place(x.shape, x.dtype)
    if total is None:
        total = x + residual
    elif not scratch.dry:
        torch.add(x, residual, out=total)
    return rms_norm(total, weight, eps, scratch), total


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dtype == torch.float32 and weight.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)
