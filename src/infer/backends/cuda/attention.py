"""Attention over the paged cache: rows of any length, decode and prefill, in one grid.

Called on the worker thread; pure. The kernels are in `attention_kernel` and `attention_merge`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from infer.backends.cuda.attention_kernel import attention_kernel
from infer.backends.cuda.attention_merge import merge_kernel
from infer.backends.cuda.device import DeviceFacts
from infer.backends.cuda.launch import Launch, ceil_div, dense_rows, power_of_two
from infer.plugins.platform import UNSCALED, AttentionMetadata, KVScales

SMALLEST_DOT = 16
"""Least rows, columns and depth of a tensor core's product."""
INVARIANT_SPLIT = 1024
"""Keys per part in the invariant mode: where a part begins depends on the position alone."""
MOST_SPLITS = 64
MIN_SPLIT = 256
"""Fewer keys are not worth a program of their own."""
WHOLE, INSIDE, STORED = 0, 1, 2
"""All keys in one go; in parts, put together by the same program; a program per part, put together by another kernel."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Query rows (tokens times heads of a group) and keys of one product."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


DECODE = Tile(16, 64, 4, 3)
DECODE_WIDE = Tile(16, 32, 4, 2)
PREFILL = Tile(128, 64, 8, 2)
PREFILL_SMALL = Tile(64, 64, 4, 2)
PREFILL_WIDE = Tile(64, 32, 8, 2)
"""Small: for GPUs whose matrix units take their operands from registers, of which 128 rows leave too few. Wide: heads of
more than 128 elements, of which two stages of keys and values must fit beside the queries."""
FP32 = Tile(16, 32, 4, 1)
FP32_WIDE = Tile(16, 16, 4, 1)
INVARIANT = Tile(64, 64, 8, 2)
INVARIANT_WIDE = Tile(64, 32, 8, 2)
"""One for all lengths: how many warps share a row decides in which order its weights are added up."""


def choose_tile(device: DeviceFacts, head_size: int, dtype: torch.dtype, query_rows: int, *, invariant: bool) -> Tile:
    """`query_rows`: tokens of the longest row times heads of a group. The invariant mode looks at no length."""
    wide = head_size > 128
    if dtype == torch.float32:  # no tensor cores
        return FP32_WIDE if wide else FP32
    if invariant:
        return INVARIANT_WIDE if wide else INVARIANT
    if query_rows <= DECODE.rows:
        return DECODE_WIDE if wide else DECODE
    return PREFILL_WIDE if wide else PREFILL if device.asynchronous_products else PREFILL_SMALL


def attention(
    launch: Launch,
    device: DeviceFacts,
    invariant: bool,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None,
    softcap: float | None,
    scales: KVScales = UNSCALED,
    /,
) -> Tensor:
    """(q [T, H, D], k_cache [blocks, block_size, K, D], v_cache [.., D']) -> [T, H, D']; see `plugins.platform.Ops`.

    `invariant`: a token's bits depend on its own row only. Keys are then cut at fixed positions, whether the parts are
    computed side by side (decode) or one after the other (prefill), and put together in the same order.
    """
    q = dense_rows(q)
    tokens, heads, head_size = q.shape
    (_, block_size, kv_heads, _), value_size = k_cache.shape, v_cache.shape[-1]
    group, num_rows = heads // kv_heads, metadata.seq_lens.shape[0]
    longest, most_queries = max(metadata.seq_lens_host, default=0), max(metadata.query_lens_host, default=0)
    tile = choose_tile(device, max(head_size, value_size), q.dtype, most_queries * group, invariant=invariant)
    tile_heads = min(group, tile.rows)
    tile_tokens = tile.rows // tile_heads
    tiles = num_rows if most_queries == 1 else tokens // tile_tokens + num_rows
    columns = kv_heads * ceil_div(group, tile_heads)
    splits = _num_splits(device, tiles * columns, longest, decode=most_queries == 1, invariant=invariant)
    mode = STORED if splits > 1 else INSIDE if invariant else WHOLE
    out = torch.empty((tokens, heads, value_size), dtype=q.dtype, device=q.device)
    parts, sums = (out, out) if splits == 1 else _part_buffers(q, splits, value_size)
    eight_bits = k_cache.dtype == torch.float8_e4m3fn
    if eight_bits and not device.native_fp8:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    main, rest = _parts_of(head_size)
    table = metadata.block_table
    launch(
        attention_kernel,
        (tiles, columns, splits),
        q,
        k_cache,
        v_cache,
        metadata.query_starts,
        metadata.seq_lens,
        table,
        out,
        parts,
        sums,
        num_rows,
        table.stride(0),
        q.stride(0),
        q.stride(1),
        k_cache.stride(1),
        k_cache.stride(2),
        v_cache.stride(1),
        v_cache.stride(2),
        window or 0,
        scale * scales[0],
        softcap or 1.0,
        scales[1],
        HEADS=heads,
        GROUP=group,
        SIZE=head_size,
        VALUE_SIZE=value_size,
        MAIN=main,
        REST=rest,
        VALUE_BLOCK=power_of_two(value_size, SMALLEST_DOT),
        BLOCK_SIZE=block_size,
        TILE_HEADS=tile_heads,
        TILE_TOKENS=tile_tokens,
        TILE_ROWS=tile.rows,
        TILE_KEYS=tile.keys,
        DECODE=most_queries == 1,
        WINDOW=window is not None,
        SOFTCAP=softcap is not None,
        MODE=mode,
        SPLITS=splits,
        SPLIT_KEYS=INVARIANT_SPLIT if invariant else 0,
        EIGHT_BITS=eight_bits,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if splits > 1:
        _merge(launch, parts, sums, out, scales[1])
    return out


def _part_buffers(q: Tensor, splits: int, value_size: int) -> tuple[Tensor, Tensor]:
    """Weighted values [T, H, splits, D'], and highest scores and sums [T, H, splits, 2], of parts of the keys."""
    shape = (*q.shape[:2], splits)
    return (
        torch.empty((*shape, value_size), dtype=torch.float32, device=q.device),
        torch.empty((*shape, 2), dtype=torch.float32, device=q.device),
    )


def _merge(launch: Launch, parts: Tensor, sums: Tensor, out: Tensor, out_scale: float) -> None:
    """(parts [T, H, splits, D'], their highest scores and sums [T, H, splits, 2]) -> out [T, H, D']."""
    tokens, heads, splits, value_size = parts.shape
    launch(
        merge_kernel,
        (tokens, heads),
        parts,
        sums,
        out,
        out_scale,
        HEADS=heads,
        VALUE_SIZE=value_size,
        VALUE_BLOCK=power_of_two(value_size),
        SPLITS=splits,
        num_warps=4,
        num_stages=1,
    )


def _num_splits(device: DeviceFacts, programs: int, longest: int, *, decode: bool, invariant: bool) -> int:
    """Programs per tile. Prefill has tiles enough; decode cuts its keys until the GPU is full."""
    if not decode or programs == 0:
        return 1
    if invariant:
        return max(1, ceil_div(longest, INVARIANT_SPLIT))
    wanted = ceil_div(2 * device.multiprocessors, programs)
    most = min(MOST_SPLITS, ceil_div(longest, MIN_SPLIT))
    return max(1, 1 << math.floor(math.log2(max(1, min(wanted, most)))))


def _parts_of(size: int) -> tuple[int, int]:
    """Powers of two that cover a head: (128, 64) for 192, so that no half of the work is padding."""
    whole = power_of_two(size, SMALLEST_DOT)
    if whole in (size, SMALLEST_DOT):
        return whole, 0
    rest = power_of_two(size - whole // 2, SMALLEST_DOT)
    return (whole // 2, rest) if whole // 2 + rest < whole else (whole, 0)
