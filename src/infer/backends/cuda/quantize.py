"""Dynamic quantisation: each row to 8 bits by its own largest element. Called on the worker thread; pure."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from infer.backends.cuda.fp8 import encode_e4m3
from infer.backends.cuda.launch import Launch, dense_rows, power_of_two, stored

WIDEST_TILE = 16384
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


@triton.jit
def round_even(x: tl.tensor) -> tl.tensor:
    """To whole numbers below 2**22: the sum with 1.5 * 2**23 has no room for a fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def quantize_kernel(
    x: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    width: int,
    x_row: int,
    LARGEST: tl.constexpr,
    FLOAT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program: row."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    most = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, width, BLOCK):
        value = tl.load(x + row * x_row + start + lane, mask=start + lane < width, other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.abs(value))
    largest = tl.max(most, axis=0)
    scale = tl.where(largest > 0, tl.div_rn(largest, LARGEST + 0.0 * largest), 1.0)
    tl.store(scales + row, scale)
    for start in range(0, width, BLOCK):
        at = start + lane
        value = tl.load(x + row * x_row + at, mask=at < width, other=0.0).to(tl.float32)
        value = tl.div_rn(value, scale + 0.0 * value)
        if FLOAT:
            tl.store(out + row * width + at, encode_e4m3(value), mask=at < width)
        else:
            value = tl.minimum(tl.maximum(round_even(value), -127.0), 127.0)
            tl.store(out + row * width + at, value.to(tl.int8), mask=at < width)


def quantize_rows(launch: Launch, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(x [T, N], int8 or float8_e4m3fn) -> (values [T, N], scales [T] fp32): x is about values * scales. A row of zeros has
    scale 1."""
    x = dense_rows(x)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    scales = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    block = min(WIDEST_TILE, power_of_two(x.shape[1]))
    launch(
        quantize_kernel,
        (x.shape[0],),
        x,
        stored(out),
        scales,
        x.shape[1],
        x.stride(0),
        LARGEST=LARGEST[dtype],
        FLOAT=dtype == torch.float8_e4m3fn,
        BLOCK=block,
        num_warps=max(4, min(16, block // 512)),
        num_stages=1,
    )
    return out, scales
