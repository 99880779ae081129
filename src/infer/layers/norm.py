"""RMS normalisation. Called on the worker thread; owns the norm weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from infer.layers.parameter import Layer, Parameter

if TYPE_CHECKING:
    from infer.plugins.model import BuildContext


class RMSNorm(Layer):
    """x / rms(x) * weight over the last dimension (arXiv:1910.07467).

    With an offset (Gemma: 1 + w) the weight is kept in fp32, because offset + w would lose bits in half precision.
    """

    def __init__(self, context: BuildContext, size: int, eps: float, *, offset: float = 0.0) -> None:
        self.ops = context.ops
        self.eps = eps
        self.offset = offset
        dtype = torch.float32 if offset else context.dtype
        self.weight = Parameter(torch.empty(size, dtype=dtype, device=context.device))

    def finalize(self) -> None:
        if self.offset:
            with torch.no_grad():
                self.weight.data = self.weight.data + self.offset

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., N] -> [..., N]."""
        return self.ops.rms_norm(x, self.weight.data, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """-> (norm(x + residual), x + residual), fused where the platform can."""
        if self.ops.add_rms_norm is not None:
            return self.ops.add_rms_norm(x, residual, self.weight.data, self.eps)
        summed = x + residual
        return self.ops.rms_norm(summed, self.weight.data, self.eps), summed
