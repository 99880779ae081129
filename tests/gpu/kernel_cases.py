"""Every kernel as a model calls it: what it does, the bytes and operations that this takes at least, and what it must reach.

Makes its tensors when a case is run, in the process of its part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu.place import Place
from infer.backends.cuda import blocks, moe, penalties, philox, quantize, router, rows, scaled_matmul
from infer.backends.cuda.launch import launch
from infer.backends.cuda.ops import make_ops
from infer.plugins.platform import AttentionMetadata, Routing

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Made:
    """A case with its tensors."""

    run: Callable[[], object]
    num_bytes: float
    """Read and written at least once, caches not counted."""
    operations: float = 0.0
    """Multiplications and additions of products."""


@dataclass(frozen=True, slots=True)
class Case:
    """`bound` says which ceiling counts; `target` is the share of it to reach, None where neither bounds the kernel."""

    name: str
    bound: str
    target: float | None
    make: Callable[[Place], Made]


def cases() -> Iterator[Case]:
    yield from _row_cases()
    yield from _attention_cases()
    yield from _product_cases()
    yield from _expert_cases()
    yield from _sampling_cases()


def floats(place: Place, *shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=place.device) * scale).to(place.kernel_dtype)


def size_of(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _row_cases() -> Iterator[Case]:
    def norm(place: Place) -> Made:
        x, weight = floats(place, place.sizes.tokens, place.sizes.hidden), floats(place, place.sizes.hidden)
        ops = make_ops(place.facts, invariant=False)
        return Made(lambda: ops.rms_norm(x, weight, 1e-5), 2 * size_of(x))

    def add_norm(place: Place) -> Made:
        x, weight = floats(place, place.sizes.tokens, place.sizes.hidden), floats(place, place.sizes.hidden)
        fused = make_ops(place.facts, invariant=False).add_rms_norm
        assert fused is not None
        return Made(lambda: fused(x, x, weight, 1e-5), 4 * size_of(x))

    def gate(place: Place) -> Made:
        x = floats(place, place.sizes.tokens, 4 * place.sizes.hidden)
        ops = make_ops(place.facts, invariant=False)
        return Made(lambda: ops.silu_and_mul(x), 1.5 * size_of(x))

    def rotate(place: Place) -> Made:
        sizes = place.sizes
        q, k = (floats(place, sizes.tokens, heads, sizes.head_size) for heads in (sizes.heads, sizes.kv_heads))
        angle = torch.rand(sizes.tokens, sizes.head_size // 2, device=place.device)
        count = -(-sizes.tokens // BLOCK_SIZE)
        keys, values = (floats(place, count, BLOCK_SIZE, sizes.kv_heads, sizes.head_size) for _ in range(2))
        slots = torch.randperm(count * BLOCK_SIZE, device=place.device)[: sizes.tokens]
        fused = make_ops(place.facts, invariant=False).rotary_and_write_kv
        assert fused is not None
        return Made(lambda: fused(q, k, k, angle, angle, keys, values, slots), 2 * size_of(q, k, k, angle))

    def embed(place: Place) -> Made:
        weight = floats(place, place.sizes.vocab, place.sizes.hidden)
        ids = torch.randint(place.sizes.vocab, (place.sizes.tokens,), device=place.device)
        ops = make_ops(place.facts, invariant=False)
        width = place.sizes.hidden * weight.element_size()
        return Made(lambda: ops.embedding(ids, weight), 2 * len(ids) * width)

    def pack(place: Place) -> Made:
        ids = torch.randint(64, (place.sizes.tokens, 48, 8), dtype=torch.int16, device=place.device)
        chosen = torch.randperm(place.sizes.tokens, device=place.device)
        return Made(lambda: rows.pack_rows(launch, ids, chosen, torch.uint8), 1.5 * size_of(ids))

    yield Case("RMS norm, a chunk", "memory", 0.7, norm)
    yield Case("sum and RMS norm, a chunk", "memory", 0.7, add_norm)
    yield Case("SiLU gate, a chunk", "memory", 0.7, gate)
    yield Case("rotary and KV write, a chunk", "memory", 0.6, rotate)
    yield Case("embedding, a chunk", "memory", 0.6, embed)
    yield Case("rows to a narrow type, a chunk", "memory", None, pack)


def metadata(place: Place, queries: list[int], lengths: list[int]) -> tuple[AttentionMetadata, int]:
    """Rows whose blocks lie in random order -> and the number of blocks."""
    counts = [-(-length // BLOCK_SIZE) for length in lengths]
    order = 1 + torch.randperm(sum(counts))
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    for row, ids in enumerate(torch.split(order, counts)):
        table[row, : len(ids)] = ids
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    device = place.device
    made = AttentionMetadata(
        query_starts=starts.to(device),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_table=table.to(device),
        slot_mapping=torch.zeros(sum(queries), dtype=torch.int64, device=device),
        query_lens_host=queries,
        seq_lens_host=lengths,
        num_decode_rows=sum(count == 1 for count in queries),
    )
    return made, 1 + sum(counts)


def _attention(place: Place, queries: list[int], lengths: list[int], *, invariant: bool, stored: torch.dtype) -> Made:
    sizes = place.sizes
    meta, count = metadata(place, queries, lengths)
    q = floats(place, sum(queries), sizes.heads, sizes.head_size)
    keys, values = (floats(place, count, BLOCK_SIZE, sizes.kv_heads, sizes.head_size).to(stored) for _ in range(2))
    ops = make_ops(place.facts, invariant=invariant)
    read = sum(lengths) * sizes.kv_heads * sizes.head_size * 2 * keys.element_size()
    seen = sum(n * (length - (n - 1) / 2) for n, length in zip(queries, lengths, strict=True))
    scale = sizes.head_size**-0.5
    return Made(
        lambda: ops.attention(q, keys, values, meta, scale, None, None, (1.0, 1.0)),
        read + 2 * size_of(q),
        4 * seen * sizes.heads * sizes.head_size,
    )


def _attention_cases() -> Iterator[Case]:
    def decode(invariant: bool, eight_bits: bool, few: bool) -> Callable[[Place], Made]:
        def make(place: Place) -> Made:
            count = 1 if few else place.sizes.rows
            stored = torch.float8_e4m3fn if eight_bits else place.kernel_dtype
            return _attention(place, [1] * count, [place.sizes.context] * count, invariant=invariant, stored=stored)

        return make

    def prefill(invariant: bool) -> Callable[[Place], Made]:
        def make(place: Place) -> Made:
            count = place.sizes.context
            return _attention(place, [count], [count], invariant=invariant, stored=place.kernel_dtype)

        return make

    yield Case("decode attention", "memory", 0.7, decode(False, False, False))
    yield Case("decode attention, invariant", "memory", 0.6, decode(True, False, False))
    yield Case("decode attention, 8-bit cache", "memory", 0.5, decode(False, True, False))
    yield Case("decode attention, one request", "memory", None, decode(False, False, True))
    yield Case("prefill attention", "matmul", 0.5, prefill(False))
    yield Case("prefill attention, invariant", "matmul", 0.4, prefill(True))


def _product_cases() -> Iterator[Case]:
    def linear(invariant: bool, chunk: bool) -> Callable[[Place], Made]:
        def make(place: Place) -> Made:
            sizes = place.sizes
            x = floats(place, sizes.tokens if chunk else sizes.rows, sizes.hidden)
            weight = floats(place, 4 * sizes.hidden, sizes.hidden, scale=0.02)
            ops = make_ops(place.facts, invariant=invariant)
            out = x.shape[0] * weight.shape[0]
            num_bytes = size_of(x, weight) + out * x.element_size()
            return Made(lambda: ops.linear(x, weight, None), num_bytes, 2 * out * sizes.hidden)

        return make

    def block(kind: str) -> Callable[[Place], Made]:
        def make(place: Place) -> Made:
            sizes, form = place.sizes, blocks.BLOCK_FORMATS[kind]
            x = floats(place, 1, sizes.hidden)
            shape = 4 * sizes.hidden, sizes.hidden // form.size * form.num_bytes
            packed = torch.zeros(shape, dtype=torch.uint8, device=place.device)
            return Made(lambda: blocks.linear(launch, False, x, packed, kind, None, x.dtype), size_of(packed))

        return make

    def scaled(chunk: bool, narrow: torch.dtype) -> Callable[[Place], Made]:
        def make(place: Place) -> Made:
            sizes = place.sizes
            x = floats(place, sizes.tokens if chunk else sizes.rows, sizes.hidden)
            weight = floats(place, 4 * sizes.hidden, sizes.hidden)
            (x, x_scales), (weight, scales) = (quantize.quantize_rows(launch, one, narrow) for one in (x, weight))
            out = x.shape[0] * weight.shape[0]

            def run() -> object:
                return scaled_matmul.scaled_matmul(
                    launch, place.facts, x, x_scales, weight, scales, None, place.kernel_dtype
                )

            return Made(run, size_of(x, weight) + 2 * out, 2 * out * sizes.hidden)

        return make

    def quantise(place: Place) -> Made:
        x = floats(place, place.sizes.tokens, place.sizes.hidden)
        return Made(lambda: quantize.quantize_rows(launch, x, torch.float8_e4m3fn), 1.5 * size_of(x))

    yield Case("dense product, a chunk (cuBLAS)", "matmul", 0.85, linear(False, True))
    yield Case("dense product, a chunk, invariant", "matmul", 0.6, linear(True, True))
    yield Case("dense product, decode (cuBLAS)", "memory", 0.7, linear(False, False))
    yield Case("dense product, decode, invariant", "memory", 0.6, linear(True, False))
    for kind in blocks.BLOCK_FORMATS:
        yield Case(f"product with {kind}, one row", "memory", 0.6, block(kind))
    yield Case("rows to fp8", "memory", 0.6, quantise)
    yield Case("fp8 product, a chunk", "matmul", 1.0, scaled(True, torch.float8_e4m3fn))
    yield Case("fp8 product, decode", "memory", 0.6, scaled(False, torch.float8_e4m3fn))
    yield Case("int8 product, a chunk", "matmul", 1.0, scaled(True, torch.int8))


def _expert_cases() -> Iterator[Case]:
    def experts(chunk: bool, invariant: bool) -> Callable[[Place], Made]:
        def make(place: Place) -> Made:
            sizes, device = place.sizes, place.device
            count, choices = sizes.tokens if chunk else sizes.rows, 2
            x = floats(place, count, sizes.hidden)
            gate_up = floats(place, sizes.experts, 2 * sizes.expert_size, sizes.hidden, scale=0.02)
            down = floats(place, sizes.experts, sizes.hidden, sizes.expert_size, scale=0.02)
            ids = torch.rand(count, sizes.experts, device=device).argsort(1)[:, :choices].contiguous()
            weights = torch.rand(count, choices, device=device)
            used = len(torch.unique(ids)) / sizes.experts
            return Made(
                lambda: moe.moe(launch, invariant, x, ids, weights, gate_up, down),
                used * size_of(gate_up, down) + 2 * size_of(x),
                2 * count * choices * 3 * sizes.expert_size * sizes.hidden,
            )

        return make

    def route(place: Place) -> Made:
        logits = torch.randn(place.sizes.tokens, place.sizes.experts, device=place.device)
        rule = Routing(top_k=2, renormalize=True)
        return Made(lambda: router.topk_router(launch, logits, rule, None, None), size_of(logits))

    yield Case("router, a chunk", "memory", None, route)
    yield Case("experts, a chunk", "matmul", 0.5, experts(True, False))
    yield Case("experts, a chunk, invariant", "matmul", 0.4, experts(True, True))
    yield Case("experts, decode", "memory", 0.6, experts(False, False))


def _sampling_cases() -> Iterator[Case]:
    def draws(top_p: float) -> Callable[[Place], Made]:
        def make(place: Place) -> Made:
            count, device = place.sizes.rows, place.device
            logits = torch.randn(count, place.sizes.vocab, device=device) * 4
            fused = make_ops(place.facts, invariant=False).draw
            assert fused is not None
            given = (
                torch.arange(count, device=device),
                torch.full((count,), 0.8, device=device),
                torch.zeros(count, dtype=torch.int64, device=device),
                torch.full((count,), top_p, dtype=torch.float64, device=device),
                torch.zeros(count, device=device),
                torch.rand(count, dtype=torch.float64, device=device),
            )
            return Made(lambda: fused(logits, *given), size_of(logits))

        return make

    def punish(place: Place) -> Made:
        count, device, vocab = place.sizes.rows, place.device, place.sizes.vocab
        logits = torch.randn(count, vocab, device=device)
        seen = min(1000, vocab)
        ids = torch.stack([torch.randperm(vocab, device=device)[:seen] for _ in range(count)])
        row = torch.arange(count, device=device).repeat_interleave(seen)
        places, counts = ids.flatten() + row * vocab, torch.ones(count * seen, device=device)
        settings = [torch.full((count,), value, device=device) for value in (1.0, 0.0, 0.0)]
        return Made(lambda: penalties.penalties(launch, logits, places, counts, row, *settings), 28.0 * len(places))

    def numbers(place: Place) -> Made:
        seeds = torch.arange(place.sizes.rows, device=place.device)
        return Made(lambda: philox.uniforms(launch, seeds, seeds), 24.0 * len(seeds))

    yield Case("draw", "memory", None, draws(1.0))
    yield Case("draw, top-p", "memory", None, draws(0.9))
    yield Case("penalties", "memory", None, punish)
    yield Case("random numbers", "memory", None, numbers)
