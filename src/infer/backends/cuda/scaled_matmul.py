"""Products of 8-bit rows with 8-bit weights, both with a scale per row: int8 or float8_e4m3fn.

Called on the worker thread; pure. GPUs without 8-bit floats multiply them in fp16, which holds each exactly.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from infer.backends.cuda.device import DeviceFacts
from infer.backends.cuda.fp8 import decode_e4m3
from infer.backends.cuda.launch import Launch, ProductTile, ceil_div, dense_rows

FEW = ProductTile(16, 64, 128, 4, 4)
SOME = ProductTile(64, 64, 128, 4, 3)
MANY = ProductTile(128, 128, 64, 8, 3)


@triton.jit
def load_eight_bits(at: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """As the matrix units take them."""
    if at.dtype.element_ty == tl.uint8:
        found = decode_e4m3(tl.load(at, mask=mask, other=0))
    elif at.dtype.element_ty == tl.int8:
        found = tl.load(at, mask=mask, other=0)
    else:
        found = tl.load(at, mask=mask, other=0.0)
    return found


@triton.jit
def scaled_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    x_scales: tl.tensor,
    weight_scales: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_rows: int,
    width: int,
    inner: int,
    x_row: int,
    weight_row: int,
    WHOLE: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    """Program (tile of weight rows, tile of rows of x)."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, DEPTH)
    exists, known = (row < num_rows)[:, None], (column < width)[None, :]
    x_at = x + row.to(tl.int64)[:, None] * x_row + k[None, :]
    weight_at = weight + column.to(tl.int64)[None, :] * weight_row + k[:, None]
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.int32 if WHOLE else tl.float32)
    for start in range(0, inner, DEPTH):
        left = inner - start
        values = load_eight_bits(x_at + start, exists & (k[None, :] < left))
        found = load_eight_bits(weight_at + start, known & (k[:, None] < left))
        total = tl.dot(values, found, total, out_dtype=tl.int32 if WHOLE else tl.float32)
    x_scale = tl.load(x_scales + row, mask=row < num_rows, other=0.0)
    weight_scale = tl.load(weight_scales + column, mask=column < width, other=0.0)
    result = total.to(tl.float32) * x_scale[:, None] * weight_scale[None, :]
    if BIAS:
        result += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    at = out + row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=exists & known)


def scaled_matmul(
    launch: Launch,
    device: DeviceFacts,
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """(x [T, I], its scales [T] fp32, weight [N, I] of the same 8-bit dtype, its scales [N] fp32, bias [N] or None, dtype)
    -> [T, N] in dtype. int8 is added up as int32 without rounding, up to I of 2**17."""
    x, weight = dense_rows(x), dense_rows(weight)
    (num_rows, inner), width = x.shape, weight.shape[0]
    tile = FEW if num_rows <= FEW.rows else SOME if num_rows <= 4 * SOME.rows else MANY
    out = torch.empty((num_rows, width), dtype=dtype, device=x.device)
    if x.dtype == torch.float8_e4m3fn and not device.native_fp8:
        x, weight = x.view(torch.uint8), weight.view(torch.uint8)
    launch(
        scaled_kernel,
        (ceil_div(width, tile.columns), ceil_div(num_rows, tile.rows)),
        x,
        weight,
        x_scales.contiguous(),
        weight_scales.contiguous(),
        x_scales if bias is None else bias.contiguous(),
        out,
        num_rows,
        width,
        inner,
        x.stride(0),
        weight.stride(0),
        WHOLE=x.dtype == torch.int8,
        BIAS=bias is not None,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out
