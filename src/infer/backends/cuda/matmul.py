"""Dense products with one fixed order of reduction, for the invariant mode: one tile whatever the number of rows.

Called on the worker thread; pure. Programs stay (persistent) and take one tile after the other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from infer.backends.cuda.device import DeviceFacts
from infer.backends.cuda.launch import Launch, ProductTile, ceil_div, dense_rows

HALF = ProductTile(64, 128, 64, 4, 4)
FP32 = ProductTile(32, 32, 32, 4, 1)
FEWER_STAGES = 2
"""Where shared memory is small. How many loads are under way moves no bit."""


@triton.jit
def persistent_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_rows: int,
    width: int,
    inner: int,
    x_row: int,
    weight_row: int,
    programs: int,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    """Tiles in the order of columns: programs that run at the same time read different weights and the same few rows."""
    row_tiles = tl.cdiv(num_rows, ROWS)
    k = tl.arange(0, DEPTH)
    for tile in range(tl.program_id(0), row_tiles * tl.cdiv(width, COLUMNS), programs):
        row = tile % row_tiles * ROWS + tl.arange(0, ROWS)
        column = tile // row_tiles * COLUMNS + tl.arange(0, COLUMNS)
        x_at = x + row.to(tl.int64)[:, None] * x_row + k[None, :]
        weight_at = weight + column.to(tl.int64)[None, :] * weight_row + k[:, None]
        total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        for start in range(0, inner, DEPTH):
            left = inner - start
            values = tl.load(x_at + start, mask=(row[:, None] < num_rows) & (k[None, :] < left), other=0.0)
            found = tl.load(weight_at + start, mask=(column[None, :] < width) & (k[:, None] < left), other=0.0)
            total = tl.dot(values, found, total, input_precision="ieee")
        if BIAS:
            total += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
        at = out + row.to(tl.int64)[:, None] * width + column[None, :]
        mask = (row[:, None] < num_rows) & (column[None, :] < width)
        tl.store(at, total.to(out.dtype.element_ty), mask=mask)


def linear(launch: Launch, device: DeviceFacts, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(x [T, I], weight [N, I], bias [N] or None) -> [T, N] in x's dtype."""
    return _product(launch, device, x, weight, bias, x.dtype)


def head_logits(launch: Launch, device: DeviceFacts, hidden: Tensor, weight: Tensor) -> Tensor:
    """(hidden [M, N], weight [V, N]) -> fp32 [M, V]."""
    return _product(launch, device, hidden, weight, None, torch.float32)


def _product(
    launch: Launch, device: DeviceFacts, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    x, weight = dense_rows(x), dense_rows(weight)
    (num_rows, inner), width = x.shape, weight.shape[0]
    out = torch.empty((num_rows, width), dtype=dtype, device=x.device)
    tile = FP32 if x.dtype == torch.float32 else HALF
    programs = min(device.multiprocessors, ceil_div(num_rows, tile.rows) * ceil_div(width, tile.columns))
    launch(
        persistent_kernel,
        (programs,),
        x,
        weight,
        x if bias is None else bias.contiguous(),
        out,
        num_rows,
        width,
        inner,
        x.stride(0),
        weight.stride(0),
        programs,
        BIAS=bias is not None,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages if device.shared_memory > 1 << 17 else min(tile.num_stages, FEWER_STAGES),
    )
    return out
