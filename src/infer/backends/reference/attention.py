"""Attention over the paged cache in plain torch: decode rows in batches, prefill rows one by one.

Called on the worker thread; the plan of a step (slots and mask) is made by the first layer and kept in the metadata.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from infer.backends.reference.kv import FP8
from infer.backends.reference.scratch import Scratch
from infer.plugins.platform import UNSCALED, AttentionMetadata, KVScales

DECODE_TOKENS = 1 << 12
"""Most cache positions gathered at once for decode rows: the copy is read again while it is in the CPU's cache (two to
six times faster than eight times as many)."""
PREFILL_QUERIES = 256
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
    first: int
    """Position of the first query."""
    lowest: int
    """Position of the first key."""
    slots: Tensor
    causal: bool
    """As many keys as queries, and every query sees all before it: no mask."""


@dataclass(slots=True)
class _Plan:
    decode: list[_Decode]
    prefill: list[_Prefill]
    mask: Tensor | None
    """[queries, width], 0 or -inf, of every piece of every row: a piece that begins at position p has its key j in column
    j - p + origin. None where no row needs one."""
    origin: int


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None,
    softcap: float | None,
    scales: KVScales = UNSCALED,
    /,
    *,
    scratch: Scratch,
) -> Tensor:
    """(q [T, H, D], k_cache [blocks, block_size, K, D], v_cache [.., D']) -> [T, H, D']; see `plugins.platform.Ops`."""
    if scales[1] != 1.0:  # sums of stored values times their scale are sums of values
        unscaled = attention(q, k_cache, v_cache, metadata, scale, window, softcap, (scales[0], 1.0), scratch=scratch)
        return unscaled if scratch.dry else unscaled.mul_(scales[1])
    key = ("reference", window, q.dtype)
    plan = metadata.scratch.get(key)
    if plan is None:
        plan = metadata.scratch[key] = _make_plan(metadata, k_cache.shape[1], window, q, scratch)
    attend = _Attend(k_cache.flatten(0, 1), v_cache.flatten(0, 1), scale * scales[0], window, softcap, scratch)
    decode = plan.decode
    if scratch.dry and len(decode) > 1:
        decode = [
            max(decode, key=lambda part: len(part.slots))
        ]  # they come one after the other, each in the same place
    if len(decode) == 1 and decode[0].rows is None:
        return attend.decode(q, decode[0])
    out = scratch.new(q, (*q.shape[:2], v_cache.shape[-1]))
    for part in decode:
        rows = part.rows
        if rows is None:
            raise TypeError("a decode part of a mixed batch names its rows")
        found = attend.decode(q.index_select(0, rows), part)
        if not scratch.dry:
            out.index_copy_(0, rows, found)
    for row in plan.prefill:
        attend.prefill(q[row.start : row.stop], row, plan, out[row.start : row.stop])
    return out


@dataclass(slots=True)
class _Attend:
    """Attention of one layer: its cache as [positions, K, D], and its rules."""

    keys: Tensor
    values: Tensor
    scale: float
    window: int | None
    softcap: float | None
    scratch: Scratch

    def decode(self, q: Tensor, part: _Decode) -> Tensor:
        """q [n, H, D] -> [n, H, D']."""
        # The query heads of a KV head become query rows: SDPA with a single query row is several times slower.
        (_, num_heads, head_size), num_kv_heads = q.shape, self.keys.shape[1]
        grouped = q.reshape(part.size, num_kv_heads, num_heads // num_kv_heads, head_size)
        k, v = (
            self._gathered(cache, part.slots, q.dtype).view(part.size, -1, *cache.shape[1:]).transpose(1, 2)
            for cache in (self.keys, self.values)
        )
        return self._attend(grouped, k, v, part.mask, causal=False).reshape(part.size, num_heads, -1)

    def prefill(self, q: Tensor, row: _Prefill, plan: _Plan, out: Tensor) -> None:
        """q [n, H, D] of one row -> out [n, H, D']."""
        k, v = (
            self._gathered(cache, row.slots, q.dtype).transpose(0, 1).unsqueeze(0) for cache in (self.keys, self.values)
        )
        queries = q.transpose(0, 1).unsqueeze(0)
        mask = plan.mask
        if row.causal or mask is None:
            found = self._attend(queries, k, v, None, causal=True)
            if not self.scratch.dry:
                out.copy_(found[0].transpose(0, 1))
            return
        for begin in range(0, len(q), PREFILL_QUERIES):
            end = min(begin + PREFILL_QUERIES, len(q))
            position = row.first + begin
            lowest = _lowest(position, self.window)
            visible = slice(lowest - row.lowest, row.first + end - row.lowest)
            columns = slice(plan.origin + lowest - position, plan.origin + end - begin)
            part = self._attend(
                queries[:, :, begin:end], k[:, :, visible], v[:, :, visible], mask[: end - begin, columns], causal=False
            )
            if not self.scratch.dry:
                out[begin:end] = part[0].transpose(0, 1)
            del part  # before the next one is made

    def _gathered(self, cache: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """[len(slots), K, D] in the compute dtype."""
        shape = len(slots), *cache.shape[1:]
        stored = cache.view(torch.uint8) if cache.dtype == FP8 else cache  # torch copies bytes by index, not this dtype
        found = self.scratch.place(shape, stored.dtype)
        if found is None:
            found = stored.index_select(0, slots)
        elif not self.scratch.dry:
            torch.index_select(stored, 0, slots, out=found)
        found = found.view(cache.dtype)
        if cache.dtype == dtype:
            return found
        converted = self.scratch.place(shape, dtype)
        if converted is None:
            return found.to(dtype)
        return converted if self.scratch.dry else converted.copy_(found)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool) -> Tensor:
        """q [B, H, T, D], k [B, K, S, D], v [B, K, S, D'], H a multiple of K -> [B, H, T, D']."""
        if self.scratch.dry:
            return _shape_of_attend(q, k, v, capped=self.softcap is not None)
        if self.softcap is None:
            grouped = q.shape[1] != k.shape[1]
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal, scale=self.scale, enable_gqa=grouped
            )
        repeat = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeat, dim=1).float(), v.repeat_interleave(repeat, dim=1).float()
        scores = (q.float() @ k.transpose(-1, -2)).mul_(self.scale / self.softcap).tanh_().mul_(self.softcap)
        if causal:
            mask = torch.full(scores.shape[-2:], -torch.inf, device=q.device).triu_(1)
        if mask is not None:
            scores = scores + mask
        return (scores.softmax(-1) @ v).to(q.dtype)


def _shape_of_attend(q: Tensor, k: Tensor, v: Tensor, *, capped: bool) -> Tensor:
    """What `_attend` allocates: its result, and with a softcap the scores twice and keys and values of every query head."""
    rows, heads, queries = q.shape[:3]
    held: list[Tensor] = []
    if capped:
        held += [torch.empty(rows, heads, queries, k.shape[2]) for _ in range(2)]
        held += [torch.empty(rows, heads, *x.shape[2:]) for x in (k, v)]
    return q.new_empty(rows, heads, queries, v.shape[-1])


def _make_plan(metadata: AttentionMetadata, block_size: int, window: int | None, q: Tensor, scratch: Scratch) -> _Plan:
    num_decode = metadata.num_decode_rows
    spans = [min(n, window) if window is not None else n for n in metadata.seq_lens_host[:num_decode]]
    alone = num_decode == len(metadata.seq_lens_host)
    decode = [
        _decode_part(metadata, rows, spans, block_size, q.dtype, whole=alone and len(rows) == num_decode)
        for rows in _similar_rows(spans)
    ]
    prefill: list[_Prefill] = []
    start = num_decode
    for row in range(num_decode, len(metadata.seq_lens_host)):
        length, count = metadata.seq_lens_host[row], metadata.query_lens_host[row]
        lowest = _lowest(length - count, window)
        positions = torch.arange(lowest, length, device=q.device).unsqueeze(0)
        slots = _slots(metadata.block_table[row : row + 1], positions, block_size).flatten()
        causal = length == count and (window is None or length <= window)
        prefill.append(_Prefill(start, start + count, length - count, lowest, slots, causal))
        start += count
    return _Plan(decode, prefill, *_mask(prefill, window, q, scratch))


def _mask(rows: list[_Prefill], window: int | None, q: Tensor, scratch: Scratch) -> tuple[Tensor | None, int]:
    """`_Plan.mask` and `_Plan.origin`."""
    masked = [row for row in rows if not row.causal]
    if not masked:
        return None, 0
    begins = [p for row in masked for p in range(row.first, row.first + row.stop - row.start, PREFILL_QUERIES)]
    origin = max(begin - _lowest(begin, window) for begin in begins)
    queries = min(PREFILL_QUERIES, max(row.stop - row.start for row in masked))
    shape = queries, origin + queries
    mask = scratch.new(q, shape)
    columns = torch.arange(-origin, queries, device=q.device).unsqueeze(0)
    for part in scratch.tiles(mask):
        own = torch.arange(queries, device=q.device)[part].unsqueeze(1)
        hidden = columns > own
        if window is not None:
            hidden |= columns <= own - window
        mask[part].zero_().masked_fill_(hidden, -torch.inf)
    return mask, origin


def _lowest(position: int, window: int | None) -> int:
    """The first position that a query sees."""
    return 0 if window is None else max(0, position - window + 1)


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


def _slots(table: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """(block table [n, blocks], positions [n, S]) -> flat cache positions [n, S]."""
    blocks = table.long().gather(1, positions // block_size)
    return blocks * block_size + positions % block_size
