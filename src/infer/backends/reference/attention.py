"""Attention over the paged cache in plain torch: decode rows in batches, prefill rows one by one.

Called on the worker thread; the plan of a step (slots and masks) is made by the first layer and kept in the metadata.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from infer.plugins.platform import AttentionMetadata

DECODE_TOKENS = 1 << 15
"""Most cache positions gathered at once for decode rows; bounds the copy."""
PREFILL_QUERIES = 512
"""Queries of one prefill row per call when a mask is needed; bounds the mask."""


@dataclass(slots=True)
class _Decode:
    """Decode rows attended together. Positions past a row's end repeat its last one, so only valid cache is read."""

    rows: Tensor | None
    """[n] int64 row numbers; None when the batch is exactly rows 0 .. n-1 and nothing else."""
    size: int
    slots: Tensor
    """[n * span] flat cache positions."""
    mask: Tensor | None
    """[n, 1, 1, span], 0 or -inf."""


@dataclass(slots=True)
class _Prefill:
    """Queries start .. stop of one row against all the keys that any of them sees."""

    start: int
    stop: int
    slots: Tensor
    mask: Tensor | None
    """[queries, keys], 0 or -inf; None: plain causal, as many keys as queries."""


@dataclass(slots=True)
class _Plan:
    decode: list[_Decode]
    prefill: list[_Prefill]


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """(q [T, H, D], k_cache [blocks, block_size, K, D], v_cache [.., D']) -> [T, H, D']; see `plugins.platform.Ops`."""
    key = ("reference", window, q.dtype)
    plan = metadata.scratch.get(key)
    if plan is None:
        plan = metadata.scratch[key] = _make_plan(metadata, k_cache.shape[1], window, q.dtype, q.device)
    keys, values = k_cache.view(-1, *k_cache.shape[2:]), v_cache.view(-1, *v_cache.shape[2:])
    if len(plan.decode) == 1 and plan.decode[0].rows is None:
        return _decode(q, keys, values, plan.decode[0], scale, softcap)
    out = q.new_empty(*q.shape[:2], values.shape[-1])
    for part in plan.decode:
        rows = part.rows
        if rows is None:
            raise TypeError("a decode part of a mixed batch names its rows")
        out.index_copy_(0, rows, _decode(q.index_select(0, rows), keys, values, part, scale, softcap))
    for piece in plan.prefill:
        out[piece.start : piece.stop] = _prefill(q[piece.start : piece.stop], keys, values, piece, scale, softcap)
    return out


def _decode(q: Tensor, keys: Tensor, values: Tensor, part: _Decode, scale: float, softcap: float | None) -> Tensor:
    # The query heads of a KV head become query rows: SDPA with a single query row is several times slower.
    (_, num_heads, head_size), num_kv_heads = q.shape, keys.shape[1]
    grouped = q.reshape(part.size, num_kv_heads, num_heads // num_kv_heads, head_size)
    shape = (part.size, -1, num_kv_heads)
    k = keys.index_select(0, part.slots).view(*shape, head_size).transpose(1, 2)
    v = values.index_select(0, part.slots).view(*shape, values.shape[-1]).transpose(1, 2)
    return _attend(grouped, k, v, part.mask, scale, softcap, causal=False).reshape(part.size, num_heads, -1)


def _prefill(q: Tensor, keys: Tensor, values: Tensor, piece: _Prefill, scale: float, softcap: float | None) -> Tensor:
    k = keys.index_select(0, piece.slots).transpose(0, 1).unsqueeze(0)
    v = values.index_select(0, piece.slots).transpose(0, 1).unsqueeze(0)
    rows = q.transpose(0, 1).unsqueeze(0)
    return _attend(rows, k, v, piece.mask, scale, softcap, causal=piece.mask is None)[0].transpose(0, 1)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None, *, causal: bool
) -> Tensor:
    """q [B, H, T, D], k [B, K, S, D], v [B, K, S, D'], H a multiple of K -> [B, H, T, D']."""
    k, v = k.to(q.dtype), v.to(q.dtype)
    if softcap is None:
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
        )
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, dim=1).float(), v.repeat_interleave(repeat, dim=1).float()
    scores = (q.float() @ k.transpose(-1, -2)).mul_(scale / softcap).tanh_().mul_(softcap)
    if causal:
        mask = torch.full(scores.shape[-2:], -torch.inf, device=q.device).triu_(1)
    if mask is not None:
        scores = scores + mask
    return (scores.softmax(-1) @ v).to(q.dtype)


def _make_plan(
    metadata: AttentionMetadata, block_size: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> _Plan:
    num_decode = metadata.num_decode_rows
    spans = [min(n, window) if window is not None else n for n in metadata.seq_lens_host[:num_decode]]
    alone = num_decode == len(metadata.seq_lens_host)
    decode = [
        _decode_part(metadata, rows, spans, block_size, dtype, whole=alone and len(rows) == num_decode)
        for rows in _similar_rows(spans)
    ]
    prefill: list[_Prefill] = []
    start = num_decode
    for row in range(num_decode, len(metadata.seq_lens_host)):
        stop = start + metadata.query_lens_host[row]
        prefill += _prefill_pieces(metadata, row, start, stop, block_size, window, dtype, device)
        start = stop
    return _Plan(decode, prefill)


def _similar_rows(spans: list[int]) -> list[list[int]]:
    """Rows to gather together: all at once, unless padding to the longest would more than double the work."""
    if not spans:
        return []
    longest = max(spans)
    if longest * len(spans) <= 2 * sum(spans) or longest * len(spans) <= 1024:
        groups = [list(range(len(spans)))]
    else:
        by_size: dict[int, list[int]] = {}
        for row, span in enumerate(spans):
            by_size.setdefault(max(span - 1, 63).bit_length(), []).append(row)
        groups = list(by_size.values())
    parts = []
    for group in groups:
        size = max(1, DECODE_TOKENS // max(spans[row] for row in group))
        parts += [group[i : i + size] for i in range(0, len(group), size)]
    return parts


def _decode_part(
    metadata: AttentionMetadata, rows: list[int], spans: list[int], block_size: int, dtype: torch.dtype, *, whole: bool
) -> _Decode:
    device = metadata.seq_lens.device
    if whole:
        index, table, lengths = None, metadata.block_table[: len(rows)], metadata.seq_lens[: len(rows)]
    else:
        index = torch.tensor(rows, device=device)
        table, lengths = metadata.block_table.index_select(0, index), metadata.seq_lens.index_select(0, index)
    span = max(spans[row] for row in rows)
    own = torch.tensor([spans[row] for row in rows], device=device).unsqueeze(1)
    steps = torch.arange(span, device=device).unsqueeze(0)
    positions = lengths.long().unsqueeze(1) - own + torch.minimum(steps, own - 1)
    mask = None
    if any(spans[row] != span for row in rows):
        mask = torch.zeros(len(rows), span, dtype=dtype, device=device).masked_fill_(steps >= own, -torch.inf)
        mask = mask[:, None, None, :]
    return _Decode(index, len(rows), _slots(table, positions, block_size).flatten(), mask)


def _prefill_pieces(
    metadata: AttentionMetadata,
    row: int,
    start: int,
    stop: int,
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> list[_Prefill]:
    length = metadata.seq_lens_host[row]
    first = length - (stop - start)
    table = metadata.block_table[row : row + 1]
    if first == 0 and (window is None or length <= window):
        slots = _slots(table, torch.arange(length, device=device).unsqueeze(0), block_size).flatten()
        return [_Prefill(start, stop, slots, None)]
    pieces = []
    for begin in range(first, length, PREFILL_QUERIES):
        end = min(begin + PREFILL_QUERIES, length)
        lowest = 0 if window is None else max(0, begin - window + 1)
        key_positions = torch.arange(lowest, end, device=device).unsqueeze(0)
        query_positions = torch.arange(begin, end, device=device).unsqueeze(1)
        hidden = key_positions > query_positions
        if window is not None:
            hidden |= key_positions <= query_positions - window
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)
        slots = _slots(table, key_positions, block_size).flatten()
        pieces.append(_Prefill(start + begin - first, start + end - first, slots, mask))
    return pieces


def _slots(table: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """(block table [n, blocks], positions [n, S]) -> flat cache positions [n, S]."""
    blocks = table.long().gather(1, positions // block_size)
    return blocks * block_size + positions % block_size
