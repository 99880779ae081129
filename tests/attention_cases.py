"""Drawn attention inputs over a paged cache, and what they must give, in fp64 loops. For the tests of every backend."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from infer.plugins.platform import Attend, AttentionMetadata


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
    scales: tuple[float, float] | None = None
    """Of a cache in float8_e4m3fn; None: the cache has the compute dtype."""

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
        scales=draw(st.none() | st.sampled_from([(1.0, 1.0), (0.25, 0.75)])),
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
    stored = case.dtype if case.scales is None else torch.float8_e4m3fn
    k_cache, v_cache = (torch.full((*shape, width), torch.nan).to(stored) for width in sizes)
    tables, keys, values = [], [], []
    for (before, _), length, count in zip(case.rows, case.lengths, needed, strict=True):
        k, v = (
            (torch.randn(length, shape[2], width, generator=generator).to(case.dtype).float() / scale).to(stored)
            for width, scale in zip(sizes, case.scales or (1.0, 1.0), strict=True)
        )
        first = case.first_visible(before)
        table = [0 if (i + 1) * size <= first else free.pop() for i in range(count)]
        for position in range(first, length):
            k_cache[table[position // size], position % size] = k[position]
            v_cache[table[position // size], position % size] = v[position]
        tables.append(table)
        keys.append(k.double() * (1.0 if case.scales is None else case.scales[0]))
        values.append(v.double() * (1.0 if case.scales is None else case.scales[1]))
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


def attend(op: Attend, case: Case, inputs: Inputs, scale: float) -> Tensor:
    """The platform's attention over a case."""
    arguments = (inputs.q, inputs.k_cache, inputs.v_cache, inputs.metadata, scale, case.window, case.softcap)
    return op(*arguments) if case.scales is None else op(*arguments, case.scales)


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
