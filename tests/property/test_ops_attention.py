"""Attention over a paged cache against fp64 loops: mixed rows, windows, softcap, every invalid position NaN."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from infer.backends.reference import attention as module
from infer.backends.reference.platform import OPS
from infer.plugins.platform import AttentionMetadata


@dataclass
class Case:
    rows: list[tuple[int, int]]
    """(context before this step, tokens in this step); decode rows first."""
    num_kv_heads: int
    group: int
    head_size: int
    value_size: int
    block_size: int
    window: int | None
    softcap: float | None
    dtype: torch.dtype
    seed: int

    @property
    def lengths(self) -> list[int]:
        return [before + count for before, count in self.rows]

    def first_visible(self, before: int) -> int:
        return 0 if self.window is None else max(0, before - self.window + 1)


@st.composite
def cases(draw: st.DrawFn, max_context: int = 40) -> Case:
    decode = [(before, 1) for before in draw(st.lists(st.integers(0, max_context), max_size=5))]
    prefill = draw(st.lists(st.tuples(st.integers(0, max_context), st.integers(2, 20)), max_size=3))
    return Case(
        rows=(decode + prefill) or [(0, 1)],
        num_kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 4)),
        head_size=draw(st.sampled_from([1, 4, 8, 20])),
        value_size=draw(st.sampled_from([1, 4, 8, 20])),
        block_size=draw(st.sampled_from([1, 3, 4, 16])),
        window=draw(st.none() | st.integers(1, 25)),
        softcap=draw(st.none() | st.sampled_from([0.5, 30.0])),
        dtype=draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16])),
        seed=draw(st.integers(0, 2**31)),
    )


@dataclass
class Inputs:
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    metadata: AttentionMetadata
    keys: list[Tensor]
    """Per row [length, K, D], fp64; the oracle reads these, never the cache."""
    values: list[Tensor]


def build(case: Case) -> Inputs:
    """Blocks in random order; blocks before the window are 0; whatever no query may see is NaN, block 0 too."""
    rng, generator = random.Random(case.seed), torch.Generator().manual_seed(case.seed)
    size = case.block_size
    needed = [-(-length // size) for length in case.lengths]
    free = list(range(1, sum(needed) + 4))
    rng.shuffle(free)
    sizes = (case.head_size, case.value_size)
    shape = (len(free) + 1, size, case.num_kv_heads)
    k_cache, v_cache = (torch.full((*shape, width), torch.nan, dtype=case.dtype) for width in sizes)
    tables, keys, values = [], [], []
    for (before, _), length, count in zip(case.rows, case.lengths, needed, strict=True):
        k, v = (torch.randn(length, shape[2], width, generator=generator).to(case.dtype) for width in sizes)
        first = case.first_visible(before)
        table = [0 if (i + 1) * size <= first else free.pop() for i in range(count)]
        for position in range(first, length):
            k_cache[table[position // size], position % size] = k[position]
            v_cache[table[position // size], position % size] = v[position]
        tables.append(table)
        keys.append(k.double())
        values.append(v.double())
    counts = [count for _, count in case.rows]
    width = max(needed) + rng.randrange(3)
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    metadata = AttentionMetadata(
        query_starts=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(case.lengths, dtype=torch.int32),
        block_table=torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32),
        slot_mapping=torch.zeros(sum(counts), dtype=torch.int64),
        query_lens_host=counts,
        seq_lens_host=case.lengths,
        num_decode_rows=next((i for i, count in enumerate(counts) if count != 1), len(counts)),
    )
    heads = case.num_kv_heads * (case.group + 2)  # a view into a fused projection, as the layers pass it
    fused = torch.randn(sum(counts), heads, case.head_size, generator=generator).to(case.dtype)
    return Inputs(fused[:, : case.num_kv_heads * case.group], k_cache, v_cache, metadata, keys, values)


def oracle(case: Case, inputs: Inputs, scale: float) -> Tensor:
    out = []
    token = 0
    for row, (before, count) in enumerate(case.rows):
        for position in range(before, before + count):
            first = case.first_visible(position)
            keys, values = inputs.keys[row][first : position + 1], inputs.values[row][first : position + 1]
            for head in range(case.num_kv_heads * case.group):
                kv_head = head // case.group
                scores = [scale * float(inputs.q[token, head].double() @ key[kv_head]) for key in keys]
                if case.softcap is not None:
                    scores = [case.softcap * math.tanh(score / case.softcap) for score in scores]
                weights = torch.tensor(scores, dtype=torch.float64).softmax(0)
                out.append(weights @ values[:, kv_head])
            token += 1
    return torch.stack(out).view(token, case.num_kv_heads * case.group, case.value_size)


def compare(case: Case) -> None:
    inputs = build(case)
    scale = 0.7 * case.head_size**-0.5
    arguments = (inputs.k_cache, inputs.v_cache, inputs.metadata, scale, case.window, case.softcap)
    exact = oracle(case, inputs, scale)
    tolerance = 2e-5 if case.dtype == torch.float32 else 3e-2
    for _ in range(2):  # the second layer of a step finds the plan in the metadata
        got = OPS.attention(inputs.q, *arguments)
        assert got.shape == exact.shape and got.dtype == case.dtype
        torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=tolerance)


@given(cases())
def test_attention(case: Case) -> None:
    compare(case)


@given(cases(), st.integers(1, 7), st.integers(1, 90))
def test_attention_in_small_pieces(case: Case, queries: int, tokens: int) -> None:
    """The bounds on mask and gather cut the work; no cut shows in the result."""
    with mock.patch.multiple(module, PREFILL_QUERIES=queries, DECODE_TOKENS=tokens):
        compare(case)


@pytest.mark.parametrize("window", [None, 100])
def test_decode_rows_of_very_different_lengths(window: int | None) -> None:
    """Short rows are not padded to the longest: they are gathered in groups of similar length."""
    rows = [(before, 1) for before in (1500, 3, 700, 0, 64, 1400, 12, 1, 130, 2)]
    case = Case(rows, 1, 3, 8, 8, 16, window, None, torch.float32, 7)
    inputs = build(case)
    OPS.attention(inputs.q, inputs.k_cache, inputs.v_cache, inputs.metadata, 0.5, window, None)
    (plan,) = inputs.metadata.scratch.values()
    spans = [min(length, window or length) for length in case.lengths]
    gathered = sum(part.slots.numel() for part in plan.decode)
    assert gathered <= 2 * sum(spans) + 64 * len(rows)
    compare(case)
    compare(Case([*rows, (200, 30), (0, 70)], 2, 2, 8, 12, 16, window, None, torch.float32, 8))
