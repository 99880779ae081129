"""Keys and values in 8-bit floats: what is stored, byte for byte, against torch's own conversion."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attention_cases import Case, attend, build
from infer.backends.cpu.build import build_library
from infer.backends.cpu.library import Library
from infer.backends.cpu.ops import make_kernels, make_ops
from infer.backends.reference.platform import OPS
from infer.plugins.platform import KVScales, Ops

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
SCALES = st.sampled_from([1.0, 0.5, 2.0, 0.1, 3.7, 0.0123])


@pytest.fixture(scope="module")
def tables(kernel_cache: Path) -> Iterator[dict[str, Ops]]:
    library = Library(build_library(kernel_cache), 2)
    yield {"cpu": make_ops(*make_kernels(library)), "reference": OPS}
    library.close()


def written(ops: Ops, k: Tensor, v: Tensor, slots: list[int], scales: KVScales) -> tuple[Tensor, Tensor]:
    """Both caches after one write into caches of 3, [12, heads, size] each."""
    caches = [torch.full((3, 4, *x.shape[1:]), 3.0).to(FP8) for x in (k, v)]
    ops.write_kv(k, v, caches[0], caches[1], torch.tensor(slots, dtype=torch.int64), scales)
    return caches[0].flatten(0, 1), caches[1].flatten(0, 1)


@pytest.mark.row("KV-FP8", "stored bytes equal torch's float8_e4m3fn rounding of x/scale exactly")
@pytest.mark.parametrize("name", ["cpu", "reference"])
@given(
    st.lists(st.integers(0, 11), max_size=12, unique=True),
    st.integers(1, 3),
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.tuples(SCALES, SCALES),
    st.integers(-14, 9),
    st.integers(0, 2**31),
)
def test_stored_bytes(
    tables: dict[str, Ops],
    name: str,
    slots: list[int],
    heads: int,
    key_size: int,
    value_size: int,
    dtype: torch.dtype,
    scales: KVScales,
    exponent: int,
    seed: int,
) -> None:
    """Of every size of number: from below half of the smallest one, 2^-10, to the largest, 448."""
    generator = torch.Generator().manual_seed(seed)
    new = []
    for size, scale in zip((key_size, value_size), scales, strict=True):
        x = torch.randn(len(slots), heads, 2 * size, generator=generator) * 2.0**exponent * scale
        x = x.clamp(-LARGEST * scale * 0.99, LARGEST * scale * 0.99).to(dtype)
        new.append(x[:, :, :size])  # rows with gaps, as a fused projection has them
    for found, x, scale in zip(written(tables[name], new[0], new[1], slots, scales), new, scales, strict=True):
        expected = torch.full(found.shape, 3.0).to(FP8)
        for slot, row in zip(slots, (x.float() / scale).to(FP8), strict=True):
            expected[slot] = row
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("name", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_bfloat16_and_the_edges(tables: dict[str, Ops], name: str, dtype: torch.dtype) -> None:
    """All 65,536 of them, ties among them: as torch where the result is finite, the largest number beyond, NaN for NaN."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).to(dtype).view(8, 1, -1)
    found = written(tables[name], every, every, list(range(8)), (1.0, 1.0))[0][:8]
    number = every.float()
    expected = number.clamp(-LARGEST, LARGEST).to(FP8)
    nan = number.isnan()
    assert torch.equal(found.view(torch.uint8)[~nan], expected.view(torch.uint8)[~nan])
    assert found.float()[nan].isnan().all()


@pytest.mark.parametrize("name", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_stored_byte_is_read_as_torch_reads_it(tables: dict[str, Ops], name: str, dtype: torch.dtype) -> None:
    """One key: what attention returns is its value."""
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(FP8).view(4, 1, 64)
    case = Case([(0, 1)] * 4, 1, 1, 64, 64, 16, None, None, dtype, 0, (1.0, 1.0))
    inputs = build(case)
    for row, values in zip(inputs.metadata.block_table[:, 0].tolist(), every, strict=True):
        inputs.v_cache[row, 0] = values
    got = attend(tables[name].attention, case, inputs, 0.1)
    assert torch.equal(got.float().flatten().nan_to_num(nan=1e9), every.float().flatten().nan_to_num(nan=1e9))
