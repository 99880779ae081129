"""Pairs (token, choice) in the order of their experts, each expert's filled up to whole tiles. On the device, without atomics:
the order is that of the tokens. Called on the worker thread; pure."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from infer.backends.cuda.launch import Launch, ceil_div, power_of_two

CHUNK = 1024
"""Pairs looked at together. One program per expert looks at all of them: 64 times for 8192 tokens of 8 choices."""


@triton.jit
def count_kernel(ids: tl.tensor, counts: tl.tensor, num_pairs: int, CHUNK: tl.constexpr) -> None:
    """Program: expert."""
    expert = tl.program_id(0)
    count = tl.zeros([CHUNK], dtype=tl.int32)
    for start in range(0, num_pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        count += (tl.load(ids + pair, mask=pair < num_pairs, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(count, axis=0))


@triton.jit
def place_kernel(
    ids: tl.tensor,
    counts: tl.tensor,
    pairs: tl.tensor,
    tile_experts: tl.tensor,
    num_pairs: int,
    num_tiles: int,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Program: expert, and one more that marks the tiles which hold nothing."""
    expert = tl.program_id(0)
    other = tl.arange(0, BLOCK)
    sizes = tl.load(counts + other, mask=other < EXPERTS, other=0)
    tiles = (sizes + TILE - 1) // TILE
    first = tl.sum(tl.where(other < expert, tiles, 0), axis=0)
    own = tl.sum(tl.where(other == expert, tiles, 0), axis=0)
    lane = tl.arange(0, CHUNK)
    if expert == EXPERTS:
        own = num_tiles - first
    for start in range(0, own, CHUNK):
        tile = start + lane
        tl.store(tile_experts + first + tile, tl.where(expert < EXPERTS, expert, -1), mask=tile < own)
    if expert < EXPERTS:
        place = first * TILE
        for start in range(0, num_pairs, CHUNK):
            pair = start + lane
            mine = tl.load(ids + pair, mask=pair < num_pairs, other=-1) == expert
            rank = tl.cumsum(mine.to(tl.int32), axis=0)
            tl.store(pairs + place + rank - 1, pair, mask=mine)
            place += tl.sum(mine.to(tl.int32), axis=0)
        rest = place + lane
        tl.store(pairs + rest, tl.full([CHUNK], 2147483647, dtype=tl.int32), mask=rest < (first + own) * TILE)


@dataclass(frozen=True, slots=True)
class SortedPairs:
    """Work of a grouped product, in tiles of `tile` rows of one expert each."""

    pairs: Tensor
    """[tiles * tile] int32: token * K + choice, or a number above all pairs where a tile is not full."""
    experts: Tensor
    """[tiles] int32: the tile's expert; -1 where a tile holds nothing."""
    tile: int


def sort_pairs(launch: Launch, ids: Tensor, num_experts: int, tile: int) -> SortedPairs:
    """(ids [T, K] int64, E, rows of a tile) -> the pairs by expert. Sizes follow from shapes alone: nothing waits for the
    device, and a graph may hold it."""
    if tile > CHUNK:
        raise ValueError(f"a tile of {tile} rows is larger than a chunk of {CHUNK}")
    ids, num_pairs = ids.contiguous(), ids.numel()
    num_tiles = min(num_pairs, ceil_div(num_pairs, tile) + num_experts)
    pairs = torch.empty(num_tiles * tile, dtype=torch.int32, device=ids.device)
    experts = torch.empty(num_tiles, dtype=torch.int32, device=ids.device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=ids.device)
    if num_pairs:
        launch(count_kernel, (num_experts,), ids, counts, num_pairs, CHUNK=CHUNK, num_warps=4, num_stages=1)
        launch(
            place_kernel,
            (num_experts + 1,),
            ids,
            counts,
            pairs,
            experts,
            num_pairs,
            num_tiles,
            EXPERTS=num_experts,
            BLOCK=power_of_two(num_experts),
            TILE=tile,
            CHUNK=CHUNK,
            num_warps=4,
            num_stages=1,
        )
    return SortedPairs(pairs, experts, tile)
