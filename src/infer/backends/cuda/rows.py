"""Rows by number: gathered as they are, or packed into a narrow integer dtype for capture beside the output.

Called on the worker thread; pure.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from infer.backends.cuda.launch import Launch, ceil_div, dense_rows, power_of_two

WIDEST_TILE = 2048
SMALL_TILE = 1024


@triton.jit
def copy_rows_kernel(
    x: tl.tensor,
    rows: tl.tensor,
    out: tl.tensor,
    num_rows: int,
    width: int,
    x_row: int,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Row i of out is row rows[i] of x, converted to out's dtype."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    exists = row < num_rows
    source = tl.load(rows + row, mask=exists, other=0).to(tl.int64)
    mask = exists[:, None] & (at < width)
    value = tl.load(x + source[:, None] * x_row + at, mask=mask)
    tl.store(out + row.to(tl.int64)[:, None] * width + at, value.to(out.dtype.element_ty), mask=mask)


def gather_rows(launch: Launch, x: Tensor, rows: Tensor) -> Tensor:
    """(x [T, N], rows [M] int64) -> [M, N]."""
    return pack_rows(launch, x, rows, x.dtype)


def embedding(launch: Launch, ids: Tensor, weight: Tensor) -> Tensor:
    """(ids [T] int64, weight [V, N]) -> [T, N]."""
    return pack_rows(launch, weight, ids, weight.dtype)


def pack_rows(launch: Launch, x: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """(x [T, ...], rows [M] int64) -> [M, ...] in `dtype`, for integers the low bits: a quarter to an eighth of the bytes
    then cross to the host."""
    flat = dense_rows(x.flatten(1))
    out = torch.empty((len(rows), *x.shape[1:]), dtype=dtype, device=x.device)
    width = flat.shape[1]
    block = min(WIDEST_TILE, power_of_two(width))
    per_program = max(1, SMALL_TILE // block)
    launch(
        copy_rows_kernel,
        (ceil_div(len(rows), per_program), ceil_div(width, block)),
        _bits(flat) if x.dtype == dtype else flat,
        rows.contiguous(),
        _bits(out) if x.dtype == dtype else out,
        len(rows),
        width,
        flat.stride(0),
        ROWS=per_program,
        BLOCK=block,
        num_warps=4,
        num_stages=1,
    )
    return out


def _bits(x: Tensor) -> Tensor:
    """What is only moved is moved as integers: one kernel for all dtypes of a size, and NaN keep their bits."""
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
