"""Kernels that go over rows: norms, gates, rotation, cache writes, gathers. Against fp64 on drawn shapes and views."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infer.backends.cuda import activation, norm, rotary, rows
from infer.backends.cuda.launch import launch
from infer.backends.reference.kv import to_fp8
from triton_kernels.drawn import DTYPES, SEEDS, close, floats, inside_nan

SIZES = st.integers(0, 5)


@given(SIZES, st.integers(1, 5), st.integers(1, 70), DTYPES, st.booleans(), SEEDS)
def test_rms_norm(t: int, h: int, n: int, dtype: torch.dtype, fp32_weight: bool, seed: int) -> None:
    x = inside_nan(floats(seed, t, h, n, dtype=dtype, scale=3.0))
    weight = floats(seed + 1, n, dtype=torch.float32 if fp32_weight else dtype)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    close(norm.rms_norm(launch, x, weight, 1e-5), exact, dtype)
    close(norm.rms_norm(launch, x[:, 0], weight, 1e-5), exact[:, 0], dtype)
    close(norm.rms_norm(launch, x.transpose(0, 1), weight, 1e-5), exact.transpose(0, 1), dtype)


@given(SIZES, st.integers(1, 70), DTYPES, SEEDS)
def test_add_rms_norm(t: int, n: int, dtype: torch.dtype, seed: int) -> None:
    x, residual = (inside_nan(floats(seed + i, t, n, dtype=dtype, scale=3.0)) for i in range(2))
    weight = floats(seed + 2, n, dtype=dtype)
    normed, total = norm.add_rms_norm(launch, x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    exact = total.double() / (total.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    close(normed, exact, dtype)


@pytest.mark.parametrize("add", [False, True])
def test_rows_wider_than_a_tile(add: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm, "WIDEST_TILE", 16)
    x, residual, weight = floats(1, 3, 50), floats(2, 3, 50), floats(3, 50)
    total = x + residual if add else x
    exact = total.double() / (total.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    got = norm.add_rms_norm(launch, x, residual, weight, 1e-5)[0] if add else norm.rms_norm(launch, x, weight, 1e-5)
    close(got, exact, torch.float32)


def test_squares_that_overflow_half_precision() -> None:
    x = torch.full((1, 64), 300.0, dtype=torch.float16)
    assert torch.equal(norm.rms_norm(launch, x, torch.ones(64), 1e-6), torch.ones(1, 64).half())


@given(SIZES, st.integers(1, 40), DTYPES, SEEDS)
def test_gates(t: int, n: int, dtype: torch.dtype, seed: int) -> None:
    x = inside_nan(floats(seed, t, 2 * n, dtype=dtype, scale=3.0))
    gate, up = x[:, :n].double(), x[:, n:].double()
    close(activation.silu_and_mul(launch, x), gate / (1 + (-gate).exp()) * up, dtype, ulps=8)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    close(activation.gelu_tanh_and_mul(launch, x), 0.5 * gate * (1 + inner.tanh()) * up, dtype, ulps=8)


def test_gates_far_from_zero() -> None:
    """No overflow on the way: both ends of each gate are exact."""
    x = torch.tensor([[-60000.0, 60000.0, 1.0, 1.0]], dtype=torch.float16)
    assert activation.silu_and_mul(launch, x).tolist() == [[0.0, 60000.0]]
    assert activation.gelu_tanh_and_mul(launch, x).tolist() == [[0.0, 60000.0]]


@given(SIZES, st.integers(1, 9), st.integers(1, 3), st.integers(1, 8), st.integers(0, 4), DTYPES, SEEDS)
def test_rotary(t: int, h: int, k: int, half: int, rest: int, dtype: torch.dtype, seed: int) -> None:
    """A rotation of the plane spanned by dimensions i and i + R, by the angle of i; the rest stays."""
    heads = inside_nan(floats(seed, t, h + k, 2 * half + rest, dtype=dtype))
    q, key = heads[:, :h], heads[:, h:]
    angles = floats(seed + 1, t, half, scale=50.0)
    for x, got in zip((q, key), rotary.rotary(launch, q, key, angles.cos(), angles.sin()), strict=True):
        plane = torch.complex(x[..., :half].double(), x[..., half : 2 * half].double())
        turned = plane * torch.exp(1j * angles.double()).unsqueeze(1)
        close(got, torch.cat((turned.real, turned.imag, x[..., 2 * half :].double()), dim=-1), dtype, ulps=4)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(1, 6), DTYPES, st.booleans(), st.data())
def test_rotation_and_cache_write_in_one(
    blocks: int, size: int, k: int, half: int, dtype: torch.dtype, fp8: bool, data: st.DataObject
) -> None:
    """The cache holds what rotary and then write_kv put there, bit for bit, and nothing else changes."""
    slots = data.draw(st.lists(st.integers(0, blocks * size - 1), max_size=8, unique=True))
    heads = inside_nan(floats(len(slots), len(slots), 3 * k, 2 * half, dtype=dtype, scale=4.0))
    q, key, value = heads.split(k, dim=1)
    value = value[..., : max(1, half)]  # narrower than keys
    angles = floats(7, len(slots), half, scale=50.0)
    scales = (0.3, 2.5) if fp8 else (1.0, 1.0)
    cache_dtype = torch.float8_e4m3fn if fp8 else dtype
    caches = [torch.full((blocks, size, k, n), 7.0).to(cache_dtype) for n in (2 * half, value.shape[-1])]
    expected = [cache.clone() for cache in caches]
    mapping = torch.tensor(slots, dtype=torch.int64)
    turned = rotary.rotary(launch, q, key, angles.cos(), angles.sin())
    got = rotary.rotary_and_write_kv(launch, q, key, value, angles.cos(), angles.sin(), *caches, mapping, scales)
    assert torch.equal(got, turned[0])
    for cache, right, new, scale in zip(caches, expected, (turned[1], value), scales, strict=True):
        flat = right.view(-1, *right.shape[2:])
        for row, slot in enumerate(slots):
            flat[slot] = to_fp8(new[row], scale) if fp8 else new[row]
        assert torch.equal(cache.view(torch.uint8), right.view(torch.uint8))


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 3), st.integers(1, 20), st.booleans(), DTYPES, st.data())
def test_write_kv(blocks: int, size: int, k: int, d: int, fp8: bool, dtype: torch.dtype, data: st.DataObject) -> None:
    """Exactly the mapped positions change, to the new values as torch rounds them."""
    slots = data.draw(st.lists(st.integers(0, blocks * size - 1), max_size=8, unique=True))
    new = inside_nan(floats(1, len(slots), 2 * k, d, dtype=dtype, scale=200.0))
    new_k, new_v = new[:, :k], new[:, k:]
    scales = (0.5, 3.0) if fp8 else (1.0, 1.0)
    caches = [torch.full((blocks, size, k, d), 3.0).to(torch.float8_e4m3fn if fp8 else dtype) for _ in range(2)]
    rotary.write_kv(launch, new_k, new_v, caches[0], caches[1], torch.tensor(slots, dtype=torch.int64), scales)
    for cache, values, scale in zip(caches, (new_k, new_v), scales, strict=True):
        expected = torch.full((blocks * size, k, d), 3.0).to(cache.dtype)
        for row, slot in enumerate(slots):
            expected[slot] = to_fp8(values[row], scale) if fp8 else values[row]
        assert torch.equal(cache.view(torch.uint8), expected.view_as(cache).view(torch.uint8))


def test_eight_bits_of_every_half_precision_number() -> None:
    """Every fp16 number, its neighbours in fp32 and what is no number: the bytes are torch's, and reading gives them back."""
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    edges = torch.tensor([math.nan, math.inf, -math.inf, 464.0, 464.1, 448.0, -1e38, 1e-45, 2**-10, 2**-10 * 1.001])
    x = torch.cat((halves, torch.nextafter(halves, torch.tensor(math.inf)), edges, torch.zeros(1024 - len(edges))))
    x = x.view(-1, 8, 128)
    cache = torch.zeros(1, *x.shape).to(torch.float8_e4m3fn)
    rotary.write_kv(launch, x, x, cache, cache, torch.arange(len(x)))
    assert torch.equal(cache.flatten().view(torch.uint8), to_fp8(x.flatten(), 1.0).view(torch.uint8))


@given(st.integers(1, 9), st.integers(1, 40), st.data())
def test_gathers(t: int, n: int, data: st.DataObject) -> None:
    weight = inside_nan(floats(t, t, n, dtype=data.draw(DTYPES)))
    ids = data.draw(st.lists(st.integers(0, t - 1), max_size=9))
    expected = weight[torch.tensor(ids, dtype=torch.int64)]
    assert torch.equal(rows.gather_rows(launch, weight, torch.tensor(ids, dtype=torch.int64)), expected)
    assert torch.equal(rows.embedding(launch, torch.tensor(ids, dtype=torch.int64), weight), expected)


@given(
    st.integers(1, 9),
    st.integers(1, 5),
    st.integers(1, 9),
    st.sampled_from([torch.uint8, torch.int16, torch.int32]),
    st.sampled_from([torch.int32, torch.int64]),
    st.data(),
)
def test_rows_packed_for_capture(
    t: int, layers: int, k: int, narrow: torch.dtype, wide: torch.dtype, data: st.DataObject
) -> None:
    """Expert ids [T, layers, K] arrive in a quarter or an eighth of their bytes, in the order that was asked for."""
    most = torch.iinfo(narrow).max
    ids = torch.randint(0, most + 1, (t, layers, k), generator=torch.Generator().manual_seed(t), dtype=wide)
    chosen = torch.tensor(data.draw(st.lists(st.integers(0, t - 1), max_size=9)), dtype=torch.int64)
    packed = rows.pack_rows(launch, ids, chosen, narrow)
    assert packed.dtype == narrow
    assert torch.equal(packed.to(wide), ids[chosen])
