"""Rotary embedding of queries and keys, alone or with the write of keys and values into the paged cache.

Called on the worker thread; `rotary_and_write_kv` and `write_kv` change the cache in place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from infer.backends.cuda.fp8 import encode_e4m3
from infer.backends.cuda.launch import Launch, ceil_div, dense_rows, power_of_two, stored
from infer.plugins.platform import UNSCALED, KVScales

TILE = 2048
"""Elements of the heads that one program turns or copies."""


@triton.jit
def store_heads(
    value: tl.tensor, target: tl.tensor, at: tl.tensor, mask: tl.tensor, scale: float, EIGHT_BITS: tl.constexpr
) -> None:
    """fp32 into a cache or a result; 8 bits take it divided by its scale, as the reference divides."""
    if EIGHT_BITS:
        tl.store(target + at, encode_e4m3(tl.div_rn(value, tl.zeros_like(value) + scale)), mask=mask)
    else:
        tl.store(target + at, value.to(target.dtype.element_ty), mask=mask)


@triton.jit
def move_heads(
    x: tl.tensor, out: tl.tensor, cos: tl.tensor, sin: tl.tensor, head: tl.tensor, heads: int, size: int,
    x_head: int, out_head: int, scale: float,
    HALF: tl.constexpr, EIGHT_BITS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
) -> None:  # fmt: skip
    """Some heads of one token: the first 2 * HALF elements are turned, the rest is copied."""
    source, place = x + head * x_head, head * out_head
    if HALF > 0:
        at = tl.arange(0, BLOCK_HALF)[None, :]
        mask = (head < heads) & (at < HALF)
        first = tl.load(source + at, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(source + HALF + at, mask=mask, other=0.0).to(tl.float32)
        c = tl.load(cos + at, mask=at < HALF, other=0.0).to(tl.float32)
        s = tl.load(sin + at, mask=at < HALF, other=0.0).to(tl.float32)
        # Rounded to their own dtype first: eight bits of them are the same whether or not this is one kernel.
        turned = (first * c - second * s).to(x.dtype.element_ty).to(tl.float32)
        store_heads(turned, out, place + at, mask, scale, EIGHT_BITS)
        turned = (second * c + first * s).to(x.dtype.element_ty).to(tl.float32)
        store_heads(turned, out, place + HALF + at, mask, scale, EIGHT_BITS)
    if BLOCK_REST > 0:
        rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
        mask = (head < heads) & (rest < size)
        value = tl.load(source + rest, mask=mask, other=0.0).to(tl.float32)
        store_heads(value, out, place + rest, mask, scale, EIGHT_BITS)


@triton.jit
def heads_kernel(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, cos: tl.tensor, sin: tl.tensor, slots: tl.tensor,
    q_out: tl.tensor, k_out: tl.tensor, v_out: tl.tensor,
    heads: int, kv_heads: int, size: int, value_size: int, angle_token: int,
    q_token: int, q_head: int, k_token: int, k_head: int, v_token: int, v_head: int,
    q_out_token: int, q_out_head: int, k_out_token: int, k_out_head: int, v_out_token: int, v_out_head: int,
    k_scale: float, v_scale: float,
    Q_TILES: tl.constexpr, K_TILES: tl.constexpr, HALF: tl.constexpr, TO_CACHE: tl.constexpr, EIGHT_BITS: tl.constexpr,
    HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, VALUE_BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Program (token, tile of heads): tiles of queries, then of keys, then of values. Keys and values go to row
    `slots[token]` of a cache, or keys to row `token` of a result."""
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    target = tl.load(slots + token) if TO_CACHE else token
    c, s = cos + token * angle_token, sin + token * angle_token
    if tile < Q_TILES:
        head = tile * HEADS + tl.arange(0, HEADS)[:, None]
        move_heads(
            q + token * q_token, q_out + token * q_out_token, c, s, head, heads, size, q_head, q_out_head, 1.0,
            HALF, False, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
    elif tile < Q_TILES + K_TILES:
        head = (tile - Q_TILES) * HEADS + tl.arange(0, HEADS)[:, None]
        move_heads(
            k + token * k_token, k_out + target * k_out_token, c, s, head, kv_heads, size, k_head, k_out_head, k_scale,
            HALF, EIGHT_BITS, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
    else:
        value_head = (tile - Q_TILES - K_TILES) * VALUE_HEADS + tl.arange(0, VALUE_HEADS)[:, None]
        move_heads(
            v + token * v_token, v_out + target * v_out_token, c, s, value_head, kv_heads, value_size, v_head, v_out_head,
            v_scale, 0, EIGHT_BITS, 1, VALUE_BLOCK,
        )  # fmt: skip


def rotary(launch: Launch, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """(q [T, H, D], k [T, K, D], cos [T, R], sin [T, R]) -> rotated q, k; rotate-half over the first 2R of D."""
    heads = q.shape[1]
    rotated = torch.empty((q.shape[0], heads + k.shape[1], q.shape[2]), dtype=q.dtype, device=q.device)
    _move(launch, q, k, None, (cos, sin), None, rotated[:, :heads], rotated[:, heads:], None, UNSCALED)
    return rotated[:, :heads], rotated[:, heads:]


def write_kv(
    launch: Launch,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    scales: KVScales = UNSCALED,
    /,
) -> None:
    """(k [T, K, D], v [T, K, D'], k_cache [blocks, block_size, K, D], v_cache [.., D'], slot_mapping [T]): in place."""
    _move(launch, None, k, v, None, slot_mapping, None, _rows(k_cache), _rows(v_cache), scales)


def rotary_and_write_kv(
    launch: Launch,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    scales: KVScales = UNSCALED,
    /,
) -> Tensor:
    """Both in one: rotated q [T, H, D]; the rotated k is nowhere but in the cache."""
    rotated = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _move(launch, q, k, v, (cos, sin), slot_mapping, rotated, _rows(k_cache), _rows(v_cache), scales)
    return rotated


def _rows(cache: Tensor) -> Tensor:
    """[blocks, block_size, ..] -> [blocks * block_size, ..], a view: a write must not go to a copy."""
    return cache.view(-1, *cache.shape[2:])


def _move(
    launch: Launch,
    q: Tensor | None,
    k: Tensor,
    v: Tensor | None,
    angles: tuple[Tensor, Tensor] | None,
    slots: Tensor | None,
    q_out: Tensor | None,
    k_out: Tensor,
    v_out: Tensor | None,
    scales: KVScales,
) -> None:
    """Rows of q, k and v [T, heads, D] into rows of their outs, q and k turned where there are angles. What is None stays
    away; k stands in for its address."""
    cos, sin = (k, k) if angles is None else (angles[0].contiguous(), angles[1].contiguous())
    half = 0 if angles is None else cos.shape[1]
    k, place = dense_rows(k), stored(k_out)
    (tokens, kv_heads, size), heads = k.shape, 0 if q is None else q.shape[1]
    q, q_place = (k, place) if q is None or q_out is None else (dense_rows(q), q_out)
    v_tiles = 0 if v is None else kv_heads
    v, v_place = (k, place) if v is None or v_out is None else (dense_rows(v), stored(v_out))
    value_size = v.shape[2]
    per_tile, values_per_tile = _heads_per_tile(max(heads, kv_heads), size), _heads_per_tile(kv_heads, value_size)
    q_tiles, k_tiles = ceil_div(heads, per_tile), ceil_div(kv_heads, per_tile)
    launch(
        heads_kernel,
        (tokens, q_tiles + k_tiles + ceil_div(v_tiles, values_per_tile)),
        *(q, k, v, cos, sin, k if slots is None else slots.contiguous(), q_place, place, v_place),
        *(heads, kv_heads, size, value_size, half),
        *(stride for x in (q, k, v, q_place, place, v_place) for stride in x.stride()[:2]),
        *scales,
        Q_TILES=q_tiles,
        K_TILES=k_tiles,
        HALF=half,
        TO_CACHE=slots is not None,
        EIGHT_BITS=place is not k_out,
        HEADS=per_tile,
        VALUE_HEADS=values_per_tile,
        BLOCK_HALF=power_of_two(half),
        BLOCK_REST=0 if size == 2 * half else power_of_two(size - 2 * half),
        VALUE_BLOCK=power_of_two(value_size),
        num_warps=4,
        num_stages=1,
    )


def _heads_per_tile(heads: int, size: int) -> int:
    return max(1, min(power_of_two(heads), TILE // power_of_two(size)))
