"""RMS norm, alone and after a sum that is kept. One pass over memory where a row fits into registers.

Called on the worker thread; pure.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from infer.backends.cuda.launch import Launch, ceil_div, dense_rows, power_of_two

WIDEST_TILE = 16384
"""Elements of a row that stay in registers (32 per thread of 16 warps); wider rows are read twice."""
SMALL_TILE = 2048
"""Elements per program where rows are short: norms over a head have 64 to 256."""


@triton.jit
def rms_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    total: tl.tensor,
    num_rows: int,
    inner: int,
    width: int,
    x_outer: int,
    x_inner: int,
    residual_outer: int,
    residual_inner: int,
    eps: float,
    ADD: tl.constexpr,
    ONE_TILE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Row i of out is row (i // inner, i % inner) of x. Squares are summed in fp32, of the sum as it is stored."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    exists = (row < num_rows)[:, None]
    column = tl.arange(0, BLOCK)
    x_row = x + (row // inner * x_outer + row % inner * x_inner)[:, None]
    residual_row = residual + (row // inner * residual_outer + row % inner * residual_inner)[:, None]
    out_row = out + (row * width)[:, None]
    total_row = total + (row * width)[:, None]
    squares = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    value = squares
    for start in range(0, width, BLOCK):
        at = start + column[None, :]
        mask = exists & (at < width)
        value = tl.load(x_row + at, mask=mask, other=0.0).to(tl.float32)
        if ADD:
            value += tl.load(residual_row + at, mask=mask, other=0.0).to(tl.float32)
            kept = value.to(total.dtype.element_ty)
            tl.store(total_row + at, kept, mask=mask)
            value = kept.to(tl.float32)
        squares += value * value
    factor = 1.0 / tl.sqrt_rn(tl.sum(squares, axis=1) / width + eps)[:, None]
    if ONE_TILE:
        at = column[None, :]
        scale = tl.load(weight + at, mask=at < width, other=0.0).to(tl.float32)
        tl.store(out_row + at, (value * factor * scale).to(out.dtype.element_ty), mask=exists & (at < width))
    else:
        for start in range(0, width, BLOCK):
            at = start + column[None, :]
            mask = exists & (at < width)
            source = total_row if ADD else x_row
            value = tl.load(source + at, mask=mask, other=0.0).to(tl.float32)
            scale = tl.load(weight + at, mask=at < width, other=0.0).to(tl.float32)
            tl.store(out_row + at, (value * factor * scale).to(out.dtype.element_ty), mask=mask)


def rms_norm(launch: Launch, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """(x [..., N], weight [N], eps) -> [..., N]; mean square, scaling and weight in fp32, one rounding at the end."""
    return _normed(launch, x, None, weight, eps)[0]


def add_rms_norm(launch: Launch, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x, residual, weight, eps) -> (rms_norm(x + residual), x + residual)."""
    return _normed(launch, x, residual, weight, eps)


def _normed(launch: Launch, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    rows = _rows(x)
    added = rows if residual is None else _rows(residual)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(out)
    num_rows, block = rows.shape[0] * rows.shape[1], power_of_two(width)
    one_tile = block <= WIDEST_TILE
    block = min(block, WIDEST_TILE)
    per_program = max(1, min(16, SMALL_TILE // block))
    launch(
        rms_norm_kernel,
        (ceil_div(num_rows, per_program),),
        rows,
        added,
        weight.contiguous(),
        out,
        out if residual is None else total,
        num_rows,
        rows.shape[1],
        width,
        rows.stride(0),
        rows.stride(1),
        added.stride(0),
        added.stride(1),
        eps,
        ADD=residual is not None,
        ONE_TILE=one_tile,
        ROWS=per_program,
        BLOCK=block,
        num_warps=max(4, min(16, block // 512)),
        num_stages=1,
    )
    return out, total


def _rows(x: Tensor) -> Tensor:
    """x as [outer, inner, N] with a dense last dimension: a view of the heads in a fused projection needs no copy."""
    x = dense_rows(x)
    if x.dim() <= 2:
        return x.reshape(-1, 1, x.shape[-1])
    return x if x.dim() == 3 else x.reshape(-1, x.shape[-2], x.shape[-1])
