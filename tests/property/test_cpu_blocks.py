"""Products with a GGUF's own blocks: right against fp64 on the `gguf` package's numbers, and invariant to the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gguf_samples import quantized
from infer.backends.cpu.block_formats import BLOCK_FORMATS
from infer.plugins.platform import BlockOps, Ops

KINDS = st.sampled_from(sorted(BLOCK_FORMATS))
SEEDS = st.integers(0, 2**31)


@pytest.fixture(scope="module")
def tables(tables: dict[int, Ops]) -> dict[int, BlockOps]:
    return {threads: table.blocks for threads, table in tables.items() if table.blocks is not None}


def weight(kind: str, rows: int, columns: int, seed: int) -> tuple[Tensor, Tensor]:
    """(stored blocks, what they stand for)."""
    stored = quantized((rows, columns), kind, seed)
    numbers = quants.dequantize(stored, GGMLQuantizationType[kind])
    return torch.from_numpy(stored.copy()), torch.from_numpy(numbers.copy())


def as_bytes(x: Tensor) -> Tensor:
    """x as the kernels see it: int8 with one scale per 32."""
    blocks = x.float().view(x.shape[0], -1, 32)
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    # The product is not rounded before it becomes an integer: the kernels multiply and add in one operation.
    return ((blocks.double() * inverse.double()).round() * scale.double()).view(x.shape)


@given(st.lists(st.tuples(KINDS, st.integers(1, 3)), min_size=1, max_size=4), st.integers(1, 9), st.booleans(), SEEDS)
def test_parts_of_different_types(
    tables: dict[int, BlockOps], parts: list[tuple[str, int]], t: int, half: bool, seed: int
) -> None:
    """Each part is computed as by itself, whatever stands beside it and whatever else is in the step."""
    dtype = torch.bfloat16 if half else torch.float32
    x = torch.randn(t, 512, generator=torch.Generator().manual_seed(seed)).to(dtype)
    packed = [(tables[2].pack(weight(kind, 16 * tiles, 512, seed)[0], kind), kind) for kind, tiles in parts]
    rows = [16 * tiles for _, tiles in parts]
    bias = torch.randn(sum(rows), generator=torch.Generator().manual_seed(seed)).to(dtype)
    for threads, table in tables.items():
        assert table.linear_parts is not None
        got = table.linear_parts(x, packed, bias, dtype)
        one = [table.linear(x, *part, b, dtype) for part, b in zip(packed, bias.split(rows), strict=True)]
        assert torch.equal(got, torch.cat(one, dim=1)), threads
        assert torch.equal(table.linear_parts(x[-1:], packed, bias, dtype), got[-1:])


@given(KINDS, st.integers(1, 40), st.integers(1, 7), st.integers(1, 6), st.booleans(), st.booleans(), SEEDS)
def test_linear_over_blocks(
    tables: dict[int, BlockOps], kind: str, t: int, tiles: int, blocks: int, half: bool, biased: bool, seed: int
) -> None:
    columns = BLOCK_FORMATS[kind].size * blocks
    stored, numbers = weight(kind, 16 * tiles, columns, seed)
    dtype = torch.bfloat16 if half else torch.float32
    x = torch.randn(t, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)
    x[0] = 0.0  # a block of zeros has no scale
    bias = torch.linspace(-1, 1, 16 * tiles).to(dtype) if biased else None
    packed = tables[2].pack(stored, kind)
    assert packed.numel() == stored.numel()  # no byte more than stored
    got = tables[2].linear(x, packed, kind, bias, torch.float32)
    exact = as_bytes(x) @ numbers.double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-4)
    rounded = tables[2].linear(x, packed, kind, bias, dtype)
    assert rounded.dtype == dtype and torch.equal(rounded, got.to(dtype))
    alone = torch.cat([tables[1].linear(x[i : i + 1], packed, kind, bias, torch.float32) for i in range(t)])
    order = torch.randperm(t)
    assert torch.equal(alone, got)
    assert torch.equal(tables[3].linear(x[order], packed, kind, bias, torch.float32), got[order])


@given(KINDS, st.integers(1, 4), st.integers(1, 5), st.integers(0, 60), SEEDS)
def test_rows_of_blocks(tables: dict[int, BlockOps], kind: str, tiles: int, blocks: int, count: int, seed: int) -> None:
    columns = BLOCK_FORMATS[kind].size * blocks
    stored, numbers = weight(kind, 16 * tiles, columns, seed)
    ids = torch.randint(0, 16 * tiles, (count,), generator=torch.Generator().manual_seed(seed))
    packed = tables[1].pack(stored, kind)
    got = tables[1].rows(ids, packed, kind, columns, torch.float32)
    torch.testing.assert_close(got, numbers[ids], rtol=1e-6, atol=1e-7)
    assert tables[1].rows(ids, packed, kind, columns, torch.bfloat16).dtype == torch.bfloat16


def test_scales_of_every_kind_of_half(tables: dict[int, BlockOps]) -> None:
    """Subnormal, largest, smallest, zero and negative fp16 scales are read as numpy reads them."""
    halves = np.array([0.0, 6e-8, 5.9e-5, 6.1e-5, 1.0, -2.5, 65504.0, -0.0] * 2, dtype=np.float16)
    stored = np.zeros((16, 34), dtype=np.uint8)
    stored[:, :2] = halves.view(np.uint8).reshape(16, 2)
    stored[:, 2:] = np.arange(32, dtype=np.int8).view(np.uint8)
    packed = tables[1].pack(torch.from_numpy(stored), "Q8_0")
    got = tables[1].rows(torch.arange(16), packed, "Q8_0", 32, torch.float32)
    expected = halves.astype(np.float32)[:, None] * np.arange(32, dtype=np.float32)
    assert np.array_equal(got.numpy(), expected)
    x = torch.zeros(1, 32)
    x[0, 3] = 127.0
    out = tables[1].linear(x, packed, "Q8_0", None, torch.float32)
    assert np.array_equal(out.numpy()[0], expected[:, 3] * np.float32(127))
