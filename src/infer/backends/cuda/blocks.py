"""Products with weights that stay in 8 or 4 bits: GGML's Q8_0, Q4_0 and Q4_1, blocks of 32 with their own scale.

Called on the worker thread; pure. Quants are whole numbers in any float dtype: a block's product is exact before it is scaled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from infer.backends.cuda.launch import Launch, ceil_div, dense_rows
from infer.plugins.platform import BlockFormat

BLOCK_SIZE: tl.constexpr = tl.constexpr(32)
BLOCK_FORMATS = {"Q8_0": BlockFormat(32, 34), "Q4_0": BlockFormat(32, 18), "Q4_1": BlockFormat(32, 20)}
SCALE_BYTES = {"Q8_0": 2, "Q4_0": 2, "Q4_1": 4}
ROW_MULTIPLE = 1
COLUMNS = 1024
"""Elements that one program of `rows` restores."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of x and of the weight."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int


FEW = Tile(16, 32, 2, 5)
MANY = Tile(64, 64, 4, 4)


def pack(stored: Tensor, kind: str) -> Tensor:
    """(stored uint8 [N, bytes of a row], kind) -> uint8 of the same shape: the quants [blocks, N, bytes], then the scales
    [blocks, N, bytes]. A tile of a product reads one piece of memory then."""
    rows = stored.shape[0]
    blocks = stored.view(rows, -1, BLOCK_FORMATS[kind].num_bytes).transpose(0, 1)
    scales, quants = blocks[:, :, : SCALE_BYTES[kind]], blocks[:, :, SCALE_BYTES[kind] :]
    return torch.cat((quants.reshape(-1), scales.reshape(-1))).view(stored.shape)


def _split(packed: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """-> (quants uint8 or int8 [..], scales fp16 [..]), flat."""
    form, flat = BLOCK_FORMATS[kind], packed.flatten()
    quants = flat.numel() // form.num_bytes * (form.num_bytes - SCALE_BYTES[kind])
    found = flat[:quants]
    return found.view(torch.int8) if kind == "Q8_0" else found, flat[quants:].view(torch.float16)


@triton.jit
def block_linear_kernel(
    x: tl.tensor,
    quants: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_rows: int,
    width: int,
    inner: int,
    x_row: int,
    FOUR_BITS: tl.constexpr,
    MINIMUM: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Program (tile of weight rows, tile of rows of x). Four bits: element i lies beside element 16 + i."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    exists, known = (row < num_rows)[:, None], (column < width)[None, :]
    x_at = x + row.to(tl.int64)[:, None] * x_row
    dtype: tl.constexpr = x.dtype.element_ty
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    half: tl.constexpr = BLOCK_SIZE // 2
    for block in range(0, inner // BLOCK_SIZE):
        weight_row = tl.cast(block, tl.int64) * width + column
        if FOUR_BITS:
            k = tl.arange(0, half)
            both = tl.load(quants + weight_row[None, :] * half + k[:, None], mask=known, other=0)
            low = tl.load(x_at + block * BLOCK_SIZE + k[None, :], mask=exists, other=0.0)
            high = tl.load(x_at + block * BLOCK_SIZE + half + k[None, :], mask=exists, other=0.0)
            part = tl.dot(low, (both & 15).to(dtype), input_precision="ieee")
            part = tl.dot(high, (both >> 4).to(dtype), part, input_precision="ieee")
            added = tl.sum(low.to(tl.float32) + high.to(tl.float32), axis=1)[:, None]
        else:
            k = tl.arange(0, BLOCK_SIZE)
            found = tl.load(quants + weight_row[None, :] * BLOCK_SIZE + k[:, None], mask=known, other=0)
            values = tl.load(x_at + block * BLOCK_SIZE + k[None, :], mask=exists, other=0.0)
            part = tl.dot(values, found.to(dtype), input_precision="ieee")
        if MINIMUM:
            scale = tl.load(scales + weight_row * 2, mask=column < width, other=0.0).to(tl.float32)
            least = tl.load(scales + weight_row * 2 + 1, mask=column < width, other=0.0).to(tl.float32)
            total += part * scale[None, :] + added * least[None, :]
        else:
            scale = tl.load(scales + weight_row, mask=column < width, other=0.0).to(tl.float32)
            if FOUR_BITS:
                part -= 8.0 * added
            total += part * scale[None, :]
    if BIAS:
        total += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    at = out + row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=exists & known)


def linear(
    launch: Launch, invariant: bool, x: Tensor, packed: Tensor, kind: str, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """(x [T, I], packed, kind, bias [N] or None, dtype) -> [T, N] in dtype."""
    x, width = dense_rows(x), packed.shape[0]
    num_rows, inner = x.shape
    quants, scales = _split(packed, kind)
    many = (invariant or num_rows > FEW.rows) and x.dtype != torch.float32  # which has no matrix units to feed
    tile = MANY if many else FEW
    out = torch.empty((num_rows, width), dtype=dtype, device=x.device)
    launch(
        block_linear_kernel,
        (ceil_div(width, tile.columns), ceil_div(num_rows, tile.rows)),
        x,
        quants,
        scales,
        x if bias is None else bias.contiguous(),
        out,
        num_rows,
        width,
        inner,
        x.stride(0),
        FOUR_BITS=kind != "Q8_0",
        MINIMUM=kind == "Q4_1",
        BIAS=bias is not None,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


@triton.jit
def block_rows_kernel(
    ids: tl.tensor,
    quants: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    num_weight_rows: int,
    inner: int,
    FOUR_BITS: tl.constexpr,
    MINIMUM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (id, part of its row)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < inner
    block = (at // BLOCK_SIZE).to(tl.int64) * num_weight_rows + tl.load(ids + row)
    k = at % BLOCK_SIZE
    if FOUR_BITS:
        half: tl.constexpr = BLOCK_SIZE // 2
        both = tl.load(quants + block * half + k % half, mask=mask, other=0).to(tl.int32)
        value = ((both >> (k // half * 4)) & 15).to(tl.float32)
    else:
        value = tl.load(quants + block * BLOCK_SIZE + k, mask=mask, other=0).to(tl.float32)
    if MINIMUM:
        value = value * tl.load(scales + block * 2, mask=mask, other=0.0).to(tl.float32)
        value += tl.load(scales + block * 2 + 1, mask=mask, other=0.0).to(tl.float32)
    else:
        if FOUR_BITS:
            value -= 8.0
        value = value * tl.load(scales + block, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * inner + at, value.to(out.dtype.element_ty), mask=mask)


def rows(launch: Launch, ids: Tensor, packed: Tensor, kind: str, inner: int, dtype: torch.dtype) -> Tensor:
    """(ids [T] int64, packed, kind, I, dtype) -> those rows of the weight, dequantised [T, I]."""
    quants, scales = _split(packed, kind)
    out = torch.empty((len(ids), inner), dtype=dtype, device=packed.device)
    launch(
        block_rows_kernel,
        (len(ids), ceil_div(inner, COLUMNS)),
        ids.contiguous(),
        quants,
        scales,
        out,
        packed.shape[0],
        inner,
        FOUR_BITS=kind != "Q8_0",
        MINIMUM=kind == "Q4_1",
        BLOCK=COLUMNS,
        num_warps=4,
        num_stages=1,
    )
    return out
