"""Gated activations. Called on the worker thread; pure."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from infer.backends.cuda.launch import Launch, ceil_div, dense_rows

BLOCK = 1024


@triton.jit
def silu(gate: tl.tensor) -> tl.tensor:
    return gate * tl.sigmoid(gate)


@triton.jit
def gelu_tanh(gate: tl.tensor) -> tl.tensor:
    """0.5 (1 + tanh(y)) is sigmoid(2y), which loses no digits where tanh is near -1."""
    return gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))


@triton.jit
def gate_kernel(x: tl.tensor, out: tl.tensor, width: int, x_row: int, GELU: tl.constexpr, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    gate = tl.load(x + row * x_row + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_row + width + at, mask=mask, other=0.0).to(tl.float32)
    active = gelu_tanh(gate) if GELU else silu(gate)
    tl.store(out + row * width + at, (active * up).to(out.dtype.element_ty), mask=mask)


def silu_and_mul(launch: Launch, x: Tensor) -> Tensor:
    """(x [T, 2N]: gate then up) -> silu(gate) * up [T, N], in fp32 until the end."""
    return _gated(launch, x, gelu=False)


def gelu_tanh_and_mul(launch: Launch, x: Tensor) -> Tensor:
    """(x [T, 2N]: gate then up) -> gelu_tanh(gate) * up [T, N], in fp32 until the end."""
    return _gated(launch, x, gelu=True)


def _gated(launch: Launch, x: Tensor, *, gelu: bool) -> Tensor:
    x = dense_rows(x)
    rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    grid = (rows, ceil_div(width, BLOCK))
    launch(gate_kernel, grid, x, out, width, x.stride(0), GELU=gelu, BLOCK=BLOCK, num_warps=4, num_stages=1)
    return out
