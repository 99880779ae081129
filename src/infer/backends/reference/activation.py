"""Gated activations in plain torch. Called on the worker thread; pure."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def silu_and_mul(x: Tensor) -> Tensor:
    """(x [T, 2N]: gate then up) -> silu(gate) * up [T, N]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """(x [T, 2N]: gate then up) -> gelu_tanh(gate) * up [T, N]."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)
