"""Experts as two grouped products: gate and up with the activation in one, down, and the weighted sum of a token's results.

Called on the worker thread; pure. Nothing is added up by atomics, so a token's result does not depend on its neighbours'.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from infer.backends.cuda.activation import silu
from infer.backends.cuda.expert_sort import SortedPairs, sort_pairs
from infer.backends.cuda.launch import Launch, ceil_div, dense_rows

SUM_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Tile:
    """Of a grouped product: rows, columns (of gate and of up each), depth."""

    rows: int
    columns: int
    gated_columns: int
    depth: int
    num_warps: int
    num_stages: int


FEW = Tile(16, 64, 32, 128, 4, 4)
SOME = Tile(64, 128, 64, 64, 4, 3)
MANY = Tile(128, 128, 64, 64, 8, 3)
FP32 = Tile(16, 32, 16, 32, 4, 1)


def choose_tile(num_pairs: int, num_experts: int, dtype: torch.dtype, *, invariant: bool) -> Tile:
    """By the rows an expert has on average; the invariant mode has one for all."""
    if dtype == torch.float32:
        return FP32
    if invariant:
        return SOME
    mean = num_pairs / num_experts
    return FEW if mean <= FEW.rows else SOME if mean <= SOME.rows else MANY


@triton.jit
def grouped_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    pairs: tl.tensor,
    tile_experts: tl.tensor,
    num_pairs: int,
    num_tiles: int,
    width: int,
    inner: int,
    x_row: int,
    weight_expert: int,
    weight_row: int,
    CHOICES: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    TOGETHER: tl.constexpr,
) -> None:
    """Row p of out is x[p // CHOICES] times the weight of its expert; of gate and up if GATED. Programs that run at the
    same time share weights: TOGETHER tiles of rows go through the columns side by side."""
    program = tl.program_id(0)
    column_tiles = tl.cdiv(width, COLUMNS)
    band = program // (TOGETHER * column_tiles)
    in_band = tl.minimum(num_tiles - band * TOGETHER, TOGETHER)
    tile = band * TOGETHER + program % (TOGETHER * column_tiles) % in_band
    column_tile = program % (TOGETHER * column_tiles) // in_band
    expert = tl.load(tile_experts + tile)
    if expert >= 0:
        pair = tl.load(pairs + tile * ROWS + tl.arange(0, ROWS))
        exists = (pair < num_pairs)[:, None]
        column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
        k = tl.arange(0, DEPTH)
        row = tl.where(pair < num_pairs, pair // CHOICES, 0).to(tl.int64)
        x_at = x + row[:, None] * x_row + k[None, :]
        weight_at = (
            weight + expert.to(tl.int64) * weight_expert + column.to(tl.int64)[None, :] * weight_row + k[:, None]
        )
        up_at = weight_at + tl.cast(width, tl.int64) * weight_row
        total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        up_total = total
        for start in range(0, inner, DEPTH):
            left = inner - start
            mask = (k[:, None] < left) & (column[None, :] < width)
            values = tl.load(x_at + start, mask=exists & (k[None, :] < left), other=0.0)
            found = tl.load(weight_at + start, mask=mask, other=0.0)
            total = tl.dot(values, found, total, input_precision="ieee")
            if GATED:
                found = tl.load(up_at + start, mask=mask, other=0.0)
                up_total = tl.dot(values, found, up_total, input_precision="ieee")
        if GATED:
            total = silu(total) * up_total
        at = pair.to(tl.int64)[:, None] * width + column[None, :]
        tl.store(out + at, total.to(out.dtype.element_ty), mask=exists & (column[None, :] < width))


@triton.jit
def weighted_sum_kernel(
    results: tl.tensor, weights: tl.tensor, out: tl.tensor, width: int, CHOICES: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Program (token, part of its row): in fp32, in the order of choices."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for choice in range(CHOICES):
        pair = token * CHOICES + choice
        value = tl.load(results + pair * width + at, mask=at < width, other=0.0).to(tl.float32)
        total += tl.load(weights + pair) * value
    tl.store(out + token * width + at, total.to(out.dtype.element_ty), mask=at < width)


def moe(
    launch: Launch, invariant: bool, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """(x [T, N], ids [T, K], weights [T, K], gate_up [E, 2I, N], down [E, N, I]) -> [T, N]."""
    (tokens, choices), experts = ids.shape, gate_up.shape[0]
    tile = choose_tile(ids.numel(), experts, x.dtype, invariant=invariant)
    order = sort_pairs(launch, ids, experts, tile.rows)
    active = _grouped(launch, dense_rows(x), gate_up, order, tile, ids.numel(), choices, gated=True)
    results = _grouped(launch, active, down, order, tile, ids.numel(), 1, gated=False)
    out = torch.empty((tokens, x.shape[1]), dtype=x.dtype, device=x.device)
    launch(
        weighted_sum_kernel,
        (tokens, ceil_div(x.shape[1], SUM_BLOCK)),
        results,
        weights.contiguous(),
        out,
        x.shape[1],
        CHOICES=choices,
        BLOCK=SUM_BLOCK,
        num_warps=4,
        num_stages=1,
    )
    return out


def _grouped(
    launch: Launch,
    x: Tensor,
    weight: Tensor,
    order: SortedPairs,
    tile: Tile,
    num_pairs: int,
    choices: int,
    *,
    gated: bool,
) -> Tensor:
    """-> [pairs, width]: a row per pair, in the order of tokens."""
    weight = dense_rows(weight)
    width = weight.shape[1] // 2 if gated else weight.shape[1]
    out = torch.empty((num_pairs, width), dtype=x.dtype, device=x.device)
    columns, num_tiles = tile.gated_columns if gated else tile.columns, len(order.experts)
    launch(
        grouped_kernel,
        (num_tiles * ceil_div(width, columns),),
        x,
        weight,
        out,
        order.pairs,
        order.experts,
        num_pairs,
        num_tiles,
        width,
        weight.shape[2],
        x.stride(0),
        weight.stride(0),
        weight.stride(1),
        CHOICES=choices,
        GATED=gated,
        ROWS=tile.rows,
        COLUMNS=columns,
        DEPTH=tile.depth,
        TOGETHER=8,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out
