"""What becomes of weights on their way into the native kernels: blocks equal to the method's own, order equal to torch's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from infer.backends.cpu.block_formats import BLOCK_FORMATS
from infer.errors import WeightError
from infer.plugins.platform import Ops
from infer.quantization.weight_only import create_int4

METHOD = create_int4(None)
KINDS = st.sampled_from(["Q8_0", "Q4_1"])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
SPREADS = st.sampled_from(["normal", "outliers", "positive", "grid", "bits", "tiny", "huge", "zeros"])


def draw(seed: int, rows: int, columns: int, spread: str) -> Tensor:
    """Numbers of many kinds, some of which have no blocks."""
    random = np.random.default_rng(seed)
    shape = (rows, columns)
    with np.errstate(over="ignore", invalid="ignore"):
        numbers = {
            "normal": lambda: 0.02 * random.standard_normal(shape),
            "outliers": lambda: random.standard_t(1, shape),
            "positive": lambda: 3 + 1e-3 * random.random(shape),
            "grid": lambda: 0.25 * random.integers(-8, 8, shape) + 0.125,  # halves of steps: ties
            "bits": lambda: random.integers(0, 2**32, shape, dtype=np.uint32).view(np.float32),
            "tiny": lambda: random.standard_normal(shape) * 10.0 ** random.integers(-45, -5, (rows, 1)),
            "huge": lambda: random.standard_normal(shape) * 10.0 ** random.integers(2, 9, (rows, 1)),
            "zeros": lambda: np.where(random.random(shape) < 0.5, 0.0, -0.0),
        }[spread]()
        return torch.from_numpy(numbers.astype(np.float32))


@given(KINDS, DTYPES, st.integers(1, 40), st.integers(1, 9), SPREADS, st.integers(0, 2**31))
@example("Q4_1", torch.float32, 1, 1, "tiny", 0)
@example("Q8_0", torch.float16, 33, 3, "normal", 0)
def test_encoders_make_the_bytes_of_the_method(
    tables: dict[int, Ops], kind: str, dtype: torch.dtype, rows: int, blocks: int, spread: str, seed: int
) -> None:
    weight = draw(seed, rows, 32 * blocks, spread).to(dtype)
    out = torch.zeros(rows, blocks * BLOCK_FORMATS[kind].num_bytes, dtype=torch.uint8)
    try:
        expected = METHOD.encode(weight, kind)
    except WeightError:
        expected = None
    for threads, ops in tables.items():
        assert ops.blocks is not None
        fine = ops.blocks.encoders[kind, METHOD.rounding(kind)](weight, out.zero_())
        assert fine == (expected is not None), f"{threads} threads"
        if expected is not None:
            assert torch.equal(out, expected), f"{threads} threads"


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_a_whole_matrix_is_the_same_for_any_number_of_threads(tables: dict[int, Ops], kind: str, threads: int) -> None:
    """Large enough that every thread has tasks."""
    weight = draw(1, 300, 1056, "normal").bfloat16()
    blocks = tables[threads].blocks
    assert blocks is not None
    out = torch.empty(300, 33 * BLOCK_FORMATS[kind].num_bytes, dtype=torch.uint8)
    assert blocks.encoders[kind, METHOD.rounding(kind)](weight, out)
    assert torch.equal(out, METHOD.encode(weight, kind))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 40_000, 65_535])
def test_one_number_without_a_block_is_noticed(tables: dict[int, Ops], bad: float, place: int) -> None:
    weight = torch.ones(64, 1024)
    weight.view(-1)[place] = bad
    blocks = tables[3].blocks
    assert blocks is not None
    assert not blocks.encoders["Q4_1", METHOD.rounding("Q4_1")](weight, torch.empty(64, 640, dtype=torch.uint8))


@given(st.integers(1, 12), st.integers(1, 70), st.booleans(), st.integers(0, 2**31))
def test_order_of_plain_weights(tables: dict[int, Ops], tiles: int, words: int, half: bool, seed: int) -> None:
    pair = 2 if half else 1
    weight = torch.randn(16 * tiles, words * pair, generator=torch.Generator().manual_seed(seed))
    weight = weight.bfloat16() if half else weight
    expected = weight.view(tiles, 16, words, pair).transpose(1, 2)
    for ops in tables.values():
        assert ops.pack is not None and ops.unpack is not None
        packed = ops.pack(weight)
        assert torch.equal(packed, expected)
        assert torch.equal(ops.unpack(packed), weight)


@given(st.sampled_from(sorted(BLOCK_FORMATS)), st.integers(1, 9), st.integers(1, 5), st.integers(0, 2**31))
def test_order_of_blocks_does_not_depend_on_threads(
    tables: dict[int, Ops], kind: str, tiles: int, blocks: int, seed: int
) -> None:
    stored = torch.from_numpy(
        np.random.default_rng(seed).integers(
            0, 256, (16 * tiles, blocks * BLOCK_FORMATS[kind].num_bytes), dtype=np.uint8
        )
    )
    one, *others = (ops.blocks.pack(stored, kind) for ops in tables.values() if ops.blocks is not None)
    assert len(others) == 2 and all(torch.equal(one, other) for other in others)
