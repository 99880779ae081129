"""int8 and int4 blocks made of plain weights, read back by the `gguf` package."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from infer.errors import WeightError
from infer.quantization.weight_only import create_int4, create_int8

KINDS = ("Q8_0", "Q4_1")
INT8, INT4 = create_int8(None), create_int4(None)


def read_back(blocks: Tensor, kind: str) -> Tensor:
    return torch.from_numpy(quants.dequantize(blocks.numpy(), GGMLQuantizationType[kind]).copy())


def draw(seed: int, rows: int, columns: int, spread: str) -> Tensor:
    """Weights of a few kinds: normal, even, with outliers, all positive."""
    random = np.random.default_rng(seed)
    numbers = {
        "normal": lambda: random.standard_normal((rows, columns)),
        "even": lambda: random.uniform(-1, 1, (rows, columns)),
        "outliers": lambda: random.standard_t(2, (rows, columns)).clip(-100, 100),
        "positive": lambda: 3 + random.random((rows, columns)),
    }[spread]()
    return torch.from_numpy((0.02 * numbers).astype(np.float32))


SPREADS = st.sampled_from(["normal", "even", "outliers", "positive"])


def test_what_becomes_of_each_role() -> None:
    assert [INT8.block_type(role) for role in ("linear", "experts", "vocabulary")] == ["Q8_0", "Q8_0", "Q8_0"]
    assert [INT4.block_type(role) for role in ("linear", "experts", "vocabulary")] == ["Q4_1", "Q4_1", "Q8_0"]


@given(st.sampled_from(KINDS), st.integers(1, 20), st.integers(1, 6), SPREADS, st.integers(0, 2**31))
def test_rows_stand_alone(kind: str, rows: int, blocks: int, spread: str, seed: int) -> None:
    weight = draw(seed, rows, 32 * blocks, spread)
    whole = INT4.encode(weight, kind)
    cut = seed % rows
    parts = [INT4.encode(part, kind) for part in (weight[:cut], weight[cut:]) if len(part)]
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(INT4.encode(weight.bfloat16(), kind), INT4.encode(weight.bfloat16().float(), kind))


@given(st.integers(1, 20), st.integers(1, 6), SPREADS, st.integers(0, 2**31))
def test_eight_bits_are_off_by_half_a_step(rows: int, blocks: int, spread: str, seed: int) -> None:
    weight = draw(seed, rows, 32 * blocks, spread)
    error = (read_back(INT8.encode(weight, "Q8_0"), "Q8_0") - weight).view(rows, blocks, 32).abs().amax(-1)
    step = weight.view(rows, blocks, 32).abs().amax(-1) / 127
    assert bool((error <= step * (0.5 + 127 * 2**-10)).all()), "the scale is an fp16"


@given(SPREADS, st.integers(0, 2**31))
def test_four_bits_are_rounded_better_than_by_the_range_of_a_block(spread: str, seed: int) -> None:
    """The judge is gguf-py's own rounding to the same format."""
    weight = draw(seed, 64, 256, spread)
    ours = read_back(INT4.encode(weight, "Q4_1"), "Q4_1") - weight
    plain = quants.quantize(weight.numpy(), GGMLQuantizationType.Q4_1)
    theirs = torch.from_numpy(quants.dequantize(plain, GGMLQuantizationType.Q4_1)) - weight
    gain = {"normal": 0.96, "even": 1.01, "outliers": 0.99, "positive": 1.01}[spread]
    assert ours.square().sum().sqrt() <= gain * theirs.square().sum().sqrt()


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_one_number(kind: str) -> None:
    weight = torch.tensor([0.0, 0.5, -0.25])[:, None].expand(3, 64)
    assert (read_back(INT4.encode(weight, kind), kind) - weight).abs().max() <= 0.5 / 127 * 0.51
    assert not read_back(INT4.encode(weight, kind), kind)[0].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_not_finite_are_refused(kind: str, bad: float) -> None:
    weight = torch.ones(2, 32)
    weight[1, 7] = bad
    with pytest.raises(WeightError, match=r"int4 holds numbers that are not finite"):
        INT4.encode(weight, kind)


def test_weights_that_no_scale_reaches_are_refused() -> None:
    with pytest.raises(WeightError, match=r"does not fit the fp16 scale"):
        INT8.encode(torch.full((1, 32), 1e8), "Q8_0")
