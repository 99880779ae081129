"""Gated activations in plain torch. Called on the worker thread; pure."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from infer.backends.reference.scratch import Scratch


def silu_and_mul(x: Tensor, scratch: Scratch) -> Tensor:
    """(x [T, 2N]: gate then up) -> silu(gate) * up [T, N]."""
    return _gated(x, F.silu, scratch)


def gelu_tanh_and_mul(x: Tensor, scratch: Scratch) -> Tensor:
    """(x [T, 2N]: gate then up) -> gelu_tanh(gate) * up [T, N]."""
    return _gated(x, _gelu_tanh, scratch)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _gated(x: Tensor, activate: Callable[[Tensor], Tensor], scratch: Scratch) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    out = scratch.place(gate.shape, x.dtype)
    if out is None:
        return activate(gate).mul_(up)
    for rows in scratch.tiles(out):
        torch.mul(activate(gate[rows]), up[rows], out=out[rows])
    return out
