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
def rotate_kernel(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    slots: tl.tensor,
    out: tl.tensor,
    heads: int,
    size: int,
    x_token: int,
    x_head: int,
    angle_token: int,
    out_token: int,
    out_head: int,
    scale: float,
    HALF: tl.constexpr,
    TO_CACHE: tl.constexpr,
    EIGHT_BITS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
) -> None:
    """Some heads of one token: the first 2 * HALF elements are turned, the rest is copied. Row `slots[token]` of a cache
    takes them, or row `token` of a result."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    target = tl.load(slots + token) if TO_CACHE else token
    source = x + token * x_token + head * x_head
    place = target * out_token + head * out_head
    if HALF > 0:
        at = tl.arange(0, BLOCK_HALF)[None, :]
        mask = (head < heads) & (at < HALF)
        first = tl.load(source + at, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(source + HALF + at, mask=mask, other=0.0).to(tl.float32)
        c = tl.load(cos + token * angle_token + at, mask=at < HALF, other=0.0).to(tl.float32)
        s = tl.load(sin + token * angle_token + at, mask=at < HALF, other=0.0).to(tl.float32)
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


def rotary(launch: Launch, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """(q [T, H, D], k [T, K, D], cos [T, R], sin [T, R]) -> rotated q, k; rotate-half over the first 2R of D."""
    heads = q.shape[1]
    rotated = torch.empty((q.shape[0], heads + k.shape[1], q.shape[2]), dtype=q.dtype, device=q.device)
    _turn(launch, q, cos, sin, None, rotated[:, :heads], 1.0)
    _turn(launch, k, cos, sin, None, rotated[:, heads:], 1.0)
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
    _turn(launch, k, None, None, slot_mapping, k_cache.view(-1, *k_cache.shape[2:]), scales[0])
    _turn(launch, v, None, None, slot_mapping, v_cache.view(-1, *v_cache.shape[2:]), scales[1])


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
    _turn(launch, q, cos, sin, None, rotated, 1.0)
    _turn(launch, k, cos, sin, slot_mapping, k_cache.view(-1, *k_cache.shape[2:]), scales[0])
    _turn(launch, v, None, None, slot_mapping, v_cache.view(-1, *v_cache.shape[2:]), scales[1])
    return rotated


def _turn(
    launch: Launch, x: Tensor, cos: Tensor | None, sin: Tensor | None, slots: Tensor | None, out: Tensor, scale: float
) -> None:
    """Rows of x [T, heads, D] into rows of out [.., heads, D], turned where there are angles."""
    x = dense_rows(x)
    tokens, heads, size = x.shape
    half = 0 if cos is None else cos.shape[1]
    angles = None if cos is None or sin is None else (cos.contiguous(), sin.contiguous())
    place = stored(out)
    per_program = max(1, min(power_of_two(heads), TILE // power_of_two(size)))
    launch(
        rotate_kernel,
        (tokens, ceil_div(heads, per_program)),
        x,
        x if angles is None else angles[0],
        x if angles is None else angles[1],
        x if slots is None else slots,
        place,
        heads,
        size,
        x.stride(0),
        x.stride(1),
        half,
        place.stride(0),
        place.stride(1),
        scale,
        HALF=half,
        TO_CACHE=slots is not None,
        EIGHT_BITS=place is not out,
        HEADS=per_program,
        BLOCK_HALF=power_of_two(half),
        BLOCK_REST=0 if size == 2 * half else power_of_two(size - 2 * half),
        num_warps=4,
        num_stages=1,
    )
