"""The kernel of `attention`: some query tokens of one row times the query heads of one KV head, over the row's keys.

Called on the worker thread; pure. Softmax is taken online (Milakov and Gimelshein, arXiv:1805.02867) in base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from infer.backends.cuda.attention_merge import merge
from infer.backends.cuda.fp8 import decode_e4m3

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def find_row(query_starts: tl.tensor, num_rows: int, tile: tl.tensor, TILE_TOKENS: tl.constexpr) -> tl.tensor:
    """The row a tile belongs to. Row r begins at tile query_starts[r] // TILE_TOKENS + r: no two rows share a tile, and
    a grid of T // TILE_TOKENS + R tiles holds them all, whatever their lengths."""
    low = tl.zeros_like(tile)
    high = low + num_rows - 1
    while low < high:
        middle = (low + high + 1) // 2
        begins = tl.load(query_starts + middle) // TILE_TOKENS + middle <= tile
        low = tl.where(begins, middle, low)
        high = tl.where(begins, high, middle - 1)
    return low


@triton.jit
def load_cached(pointers: tl.tensor, mask: tl.tensor, DTYPE: tl.constexpr, EIGHT_BITS: tl.constexpr) -> tl.tensor:
    """Keys or values in the dtype of the queries; what no query may see is 0, for it may be NaN."""
    if EIGHT_BITS and pointers.dtype.element_ty == tl.uint8:
        return decode_e4m3(tl.load(pointers, mask=mask, other=0)).to(DTYPE)
    return tl.load(pointers, mask=mask, other=0.0).to(DTYPE)


@triton.jit
def attend(
    q_main: tl.tensor, q_rest: tl.tensor, k_cache: tl.tensor, v_cache: tl.tensor, table: tl.tensor,
    position: tl.tensor, begin: tl.tensor, end: tl.tensor, lowest: tl.tensor, k_slot: int, v_slot: int, window: int,
    scale: float, softcap: float, SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, MAIN: tl.constexpr,
    REST: tl.constexpr, VALUE_BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, EIGHT_BITS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Keys begin .. end, of which those before `lowest` count for no query -> (highest score, sum, weighted values)."""
    dtype: tl.constexpr = q_main.dtype
    highest = tl.full([TILE_ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([TILE_ROWS], dtype=tl.float32)
    values = tl.zeros([TILE_ROWS, VALUE_BLOCK], dtype=tl.float32)
    main, rest, column = tl.arange(0, MAIN), MAIN + tl.arange(0, max(REST, 1)), tl.arange(0, VALUE_BLOCK)
    for start in range(begin, end, TILE_KEYS):
        key = start + tl.arange(0, TILE_KEYS)
        exists = (key < end) & (key >= lowest)
        block = tl.load(table + key // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
        slot = block * BLOCK_SIZE + key % BLOCK_SIZE
        at = k_cache + slot[None, :] * k_slot
        keys = load_cached(at + main[:, None], exists[None, :] & (main[:, None] < SIZE), dtype, EIGHT_BITS)
        scores = tl.dot(q_main, keys, input_precision="ieee")
        if REST > 0:
            keys = load_cached(at + rest[:, None], exists[None, :] & (rest[:, None] < SIZE), dtype, EIGHT_BITS)
            scores = tl.dot(q_rest, keys, scores, input_precision="ieee")
        scores *= scale
        if SOFTCAP:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        visible = exists[None, :] & (key[None, :] <= position[:, None])
        if WINDOW:
            visible = visible & (key[None, :] > position[:, None] - window)
        scores = tl.where(visible, scores * LOG2_E, float("-inf"))
        now = tl.maximum(highest, tl.max(scores, axis=1))
        finite = tl.where(now == float("-inf"), 0.0, now)
        weights = tl.exp2(scores - finite[:, None])
        shrink = tl.exp2(highest - finite)
        total = total * shrink + tl.sum(weights, axis=1)
        at = v_cache + slot[:, None] * v_slot
        found = load_cached(at + column[None, :], exists[:, None] & (column[None, :] < VALUE_SIZE), dtype, EIGHT_BITS)
        values = tl.dot(weights.to(dtype), found, values * shrink[:, None], input_precision="ieee")
        highest = now
    return highest, total, values


@triton.jit
def attention_kernel(
    q: tl.tensor, k_cache: tl.tensor, v_cache: tl.tensor, query_starts: tl.tensor, seq_lens: tl.tensor,
    block_table: tl.tensor, out: tl.tensor, parts: tl.tensor, sums: tl.tensor, num_rows: int, table_row: int,
    q_token: int, q_head: int, k_slot: int, k_head: int, v_slot: int, v_head: int, window: int, scale: float,
    softcap: float, out_scale: float, HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE_HEADS: tl.constexpr, TILE_TOKENS: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr, DECODE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MODE: tl.constexpr,
    SPLITS: tl.constexpr, SPLIT_KEYS: tl.constexpr, EIGHT_BITS: tl.constexpr,
) -> None:  # fmt: skip
    """Program (tile of query tokens, tile of heads, part of the keys)."""
    tile = tl.program_id(0)
    row = tile if DECODE else find_row(query_starts, num_rows, tile, TILE_TOKENS)
    start = tl.load(query_starts + row)
    count = tl.load(query_starts + row + 1) - start
    first = 0 if DECODE else (tile - start // TILE_TOKENS - row) * TILE_TOKENS
    if first < count:
        length = tl.load(seq_lens + row)
        head_tiles: tl.constexpr = (GROUP + TILE_HEADS - 1) // TILE_HEADS
        kv_head = tl.program_id(1) // head_tiles
        line = tl.arange(0, TILE_ROWS)
        token = first + line // TILE_HEADS
        in_group = tl.program_id(1) % head_tiles * TILE_HEADS + line % TILE_HEADS
        asked = (line < TILE_HEADS * TILE_TOKENS) & (token < count) & (in_group < GROUP)
        position = length - count + token
        place = (start + token).to(tl.int64)
        head = kv_head * GROUP + in_group
        main, rest = tl.arange(0, MAIN)[None, :], MAIN + tl.arange(0, max(REST, 1))[None, :]
        at = q + (place * q_token + head * q_head)[:, None]
        q_main = tl.load(at + main, mask=asked[:, None] & (main < SIZE), other=0.0)
        q_rest = q_main
        if REST > 0:
            q_rest = tl.load(at + rest, mask=asked[:, None] & (rest < SIZE), other=0.0)
        end = tl.minimum(length, length - count + first + TILE_TOKENS)
        lowest = tl.maximum(length - count + first - window + 1, 0) if WINDOW else 0
        begin = lowest // TILE_KEYS * TILE_KEYS
        keys_of = k_cache + kv_head.to(tl.int64) * k_head
        values_of = v_cache + kv_head.to(tl.int64) * v_head
        table = block_table + row.to(tl.int64) * table_row
        highest = tl.full([TILE_ROWS], float("-inf"), dtype=tl.float32)
        total = tl.zeros([TILE_ROWS], dtype=tl.float32)
        values = tl.zeros([TILE_ROWS, VALUE_BLOCK], dtype=tl.float32)
        # How many keys a part has is rounded up to whole tiles, so that a part is a number of full products.
        part = SPLIT_KEYS if SPLIT_KEYS > 0 else tl.cdiv(tl.cdiv(length, SPLITS), TILE_KEYS) * TILE_KEYS
        from_part = 0 if MODE == 0 else tl.program_id(2) if MODE == 2 else begin // part
        to_part = 1 if MODE == 0 else tl.program_id(2) + 1 if MODE == 2 else tl.cdiv(end, part)
        for number in range(from_part, to_part):
            from_key = begin if MODE == 0 else tl.maximum(begin, number * part)
            to_key = end if MODE == 0 else tl.minimum(end, (number + 1) * part)
            found = attend(
                q_main, q_rest, keys_of, values_of, table, position, from_key, to_key, lowest, k_slot, v_slot, window,
                scale, softcap, SIZE, VALUE_SIZE, MAIN, REST, VALUE_BLOCK, BLOCK_SIZE, TILE_ROWS, TILE_KEYS,
                WINDOW, SOFTCAP, EIGHT_BITS,
            )  # fmt: skip
            if MODE == 1:
                highest, total, values = merge(highest, total, values, found[0], found[1], found[2])
            else:
                highest, total, values = found
        column = tl.arange(0, VALUE_BLOCK)[None, :]
        flat = place * HEADS + head
        mask = asked[:, None] & (column < VALUE_SIZE)
        if MODE == 2:
            flat = flat * SPLITS + tl.program_id(2)
            tl.store(parts + flat[:, None] * VALUE_SIZE + column, values, mask=mask)
            tl.store(sums + flat * 2, highest, mask=asked)
            tl.store(sums + flat * 2 + 1, total, mask=asked)
        else:
            result = values / tl.where(total > 0, total, 1.0)[:, None] * out_scale
            tl.store(out + flat[:, None] * VALUE_SIZE + column, result.to(out.dtype.element_ty), mask=mask)
