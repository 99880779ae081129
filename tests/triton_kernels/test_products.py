"""Products: dense in one order, with weights in blocks, of 8-bit rows; and the quantisation of rows. Against fp64."""

from __future__ import annotations

import math

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infer.backends.cuda import blocks, matmul, scaled_matmul
from infer.backends.cuda.device import DeviceFacts
from infer.backends.cuda.launch import ProductTile, launch
from infer.backends.cuda.quantize import quantize_rows
from infer.backends.reference.kv import to_fp8
from triton_kernels.drawn import DTYPES, SEEDS, close, floats, inside_nan

SMALL = DeviceFacts(multiprocessors=2, shared_memory=1 << 16, native_fp8=False)
LARGE = DeviceFacts(multiprocessors=132, shared_memory=232448, native_fp8=True)
ROWS = st.integers(0, 7)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles in every direction."""
    monkeypatch.setattr(matmul, "HALF", ProductTile(4, 8, 16, 4, 1))
    monkeypatch.setattr(matmul, "FP32", ProductTile(4, 8, 16, 4, 1))
    monkeypatch.setattr(blocks, "FEW", blocks.Tile(2, 8, 4, 1))
    monkeypatch.setattr(blocks, "MANY", blocks.Tile(4, 16, 4, 1))
    monkeypatch.setattr(blocks, "COLUMNS", 64)
    for name in ("FEW", "SOME", "MANY"):
        monkeypatch.setattr(scaled_matmul, name, ProductTile(2, 8, 16, 4, 1))


@given(ROWS, st.integers(1, 40), st.integers(1, 40), DTYPES, st.booleans(), SEEDS)
def test_dense(t: int, i: int, n: int, dtype: torch.dtype, biased: bool, seed: int) -> None:
    x, weight = inside_nan(floats(seed, t, i, dtype=dtype)), inside_nan(floats(seed + 1, n, i, dtype=dtype))
    bias = floats(seed + 2, n, dtype=dtype) if biased else None
    product = x.double() @ weight.double().t()
    for device in (SMALL, LARGE):
        got = matmul.linear(launch, device, x, weight, bias)
        close(got, product + (bias.double() if bias is not None else 0), dtype, ulps=4)
        close(matmul.head_logits(launch, device, x, weight), product, torch.float32, ulps=8)


@given(st.integers(1, 9), st.integers(0, 8), DTYPES, SEEDS)
def test_a_row_has_the_same_bits_in_any_company(t: int, row: int, dtype: torch.dtype, seed: int) -> None:
    """On however many multiprocessors."""
    x, weight, row = floats(seed, t, 50, dtype=dtype), floats(seed + 1, 20, 50, dtype=dtype), row % t
    alone = matmul.linear(launch, SMALL, x[row : row + 1], weight, None)
    assert torch.equal(matmul.linear(launch, LARGE, x, weight, None)[row : row + 1], alone)


@given(
    st.sampled_from(["Q8_0", "Q4_0", "Q4_1"]), ROWS, st.integers(1, 3), st.integers(1, 30), DTYPES, st.booleans(), SEEDS
)
def test_weights_in_blocks(kind: str, t: int, i: int, n: int, dtype: torch.dtype, biased: bool, seed: int) -> None:
    """What the gguf package writes and reads."""
    type_ = gguf.GGMLQuantizationType[kind]
    stored = gguf.quants.quantize(floats(seed, n, 32 * i, scale=0.3).numpy(), type_)
    weight = torch.from_numpy(gguf.quants.dequantize(stored, type_)).double()
    packed = blocks.pack(torch.from_numpy(np.ascontiguousarray(stored)), kind)
    x = inside_nan(floats(seed + 1, t, 32 * i, dtype=dtype))
    bias = floats(seed + 2, n, dtype=dtype) if biased else None
    exact = x.double() @ weight.t() + (bias.double() if bias is not None else 0)
    for invariant in (False, True):
        close(blocks.linear(launch, invariant, x, packed, kind, bias, dtype), exact, dtype, ulps=8)
        close(blocks.linear(launch, invariant, x, packed, kind, bias, torch.float32), exact, torch.float32, ulps=32)
    ids = torch.tensor([(seed + j) % n for j in range(t)], dtype=torch.int64)
    assert torch.equal(blocks.rows(launch, ids, packed, kind, 32 * i, torch.float32).double(), weight[ids])


@given(ROWS, st.integers(1, 70), DTYPES, st.sampled_from([torch.int8, torch.float8_e4m3fn]), SEEDS)
def test_rows_to_eight_bits(t: int, n: int, dtype: torch.dtype, narrow: torch.dtype, seed: int) -> None:
    """As torch rounds x / scale, with the scale that makes the largest element the largest number."""
    x = inside_nan(floats(seed, t, n, dtype=dtype, scale=5.0))
    x[: t // 2] *= 0
    values, scales = quantize_rows(launch, x, narrow)
    largest = x.float().abs().amax(1)
    expected = torch.where(largest > 0, largest / (127.0 if narrow == torch.int8 else 448.0), 1.0)
    assert torch.equal(scales, expected)
    if narrow == torch.int8:
        right = (x.float() / scales[:, None]).round().clamp(-127, 127).to(torch.int8)
    else:
        right = torch.stack([to_fp8(row, float(scale)) for row, scale in zip(x, scales, strict=True)]) if t else values
    assert torch.equal(values.view(torch.uint8), right.view(torch.uint8))


def test_rows_wider_than_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    x = floats(1, 2, 50)
    whole = quantize_rows(launch, x, torch.int8)
    monkeypatch.setattr("infer.backends.cuda.quantize.WIDEST_TILE", 16)
    assert all(torch.equal(a, b) for a, b in zip(quantize_rows(launch, x, torch.int8), whole, strict=True))


@given(ROWS, st.integers(1, 50), st.integers(1, 20), st.booleans(), st.booleans(), st.booleans(), SEEDS)
def test_products_of_eight_bits(t: int, i: int, n: int, whole: bool, native: bool, biased: bool, seed: int) -> None:
    dtype = torch.int8 if whole else torch.float8_e4m3fn
    x, x_scales = quantize_rows(launch, floats(seed, t, i), dtype)
    weight, weight_scales = quantize_rows(launch, floats(seed + 1, n, i), dtype)
    bias = floats(seed + 2, n) if biased else None
    exact = (x.double() * x_scales[:, None].double()) @ (weight.double() * weight_scales[:, None].double()).t()
    exact = exact + (bias.double() if bias is not None else 0)
    device = LARGE if native else SMALL
    got = scaled_matmul.scaled_matmul(launch, device, x, x_scales, weight, weight_scales, bias, torch.float32)
    close(got, exact, torch.float32, ulps=32)


def test_no_number_stays_no_number() -> None:
    """A row that a fault made NaN does not come out of 8 bits as numbers."""
    x = torch.tensor([[math.nan, 1.0]])
    values, _ = quantize_rows(launch, x, torch.float8_e4m3fn)
    assert values.float().isnan()[0, 0]
