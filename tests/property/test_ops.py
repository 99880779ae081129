"""Every op but attention against an independent fp64 computation on drawn shapes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from infer.backends.reference.platform import OPS

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
SIZES = st.integers(1, 9)
SEEDS = st.integers(0, 2**31)


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def close(got: Tensor, exact: Tensor, dtype: torch.dtype, ulps: float = 2.0) -> None:
    """Within a few roundings of the output dtype."""
    eps = torch.finfo(dtype).eps
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), exact, rtol=ulps * eps, atol=4 * ulps * eps)


@given(SIZES, SIZES, st.integers(1, 70), DTYPES, st.booleans(), SEEDS)
def test_rms_norm(t: int, h: int, n: int, dtype: torch.dtype, fp32_weight: bool, seed: int) -> None:
    x = draw(seed, t, h, n, dtype=dtype, scale=3.0)
    weight = draw(seed + 1, n, dtype=torch.float32 if fp32_weight else dtype)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    close(OPS.rms_norm(x, weight, 1e-5), exact, dtype)
    strided = torch.stack((x, x), dim=2)[:, :, 0]
    close(OPS.rms_norm(strided, weight, 1e-5), exact, dtype)


def test_rms_norm_sums_in_fp32() -> None:
    """The squares of these values overflow half precision."""
    x = torch.full((1, 64), 300.0, dtype=torch.float16)
    assert torch.equal(OPS.rms_norm(x, torch.ones(64, dtype=torch.float16), 1e-6), torch.ones(1, 64).half())


@given(SIZES, st.integers(1, 20), st.integers(1, 20), DTYPES, st.booleans(), SEEDS)
def test_linear(t: int, i: int, n: int, dtype: torch.dtype, biased: bool, seed: int) -> None:
    x, weight = draw(seed, t, i, dtype=dtype), draw(seed + 1, n, i, dtype=dtype)
    bias = draw(seed + 2, n, dtype=dtype) if biased else None
    exact = x.double() @ weight.double().t() + (bias.double() if bias is not None else 0)
    close(OPS.linear(x, weight, bias), exact, dtype, ulps=4)


@given(SIZES, SIZES, SIZES, st.integers(1, 8), st.integers(0, 4), DTYPES, SEEDS)
def test_rotary(t: int, h: int, k: int, half: int, rest: int, dtype: torch.dtype, seed: int) -> None:
    """A rotation of the plane spanned by dimensions i and i + R, by the angle of i; the rest stays."""
    size = 2 * half + rest
    heads = draw(seed, t, h + 2 * k, size, dtype=dtype)
    q, key = heads[:, :h], heads[:, h : h + k]
    angles = draw(seed + 1, t, half, scale=50.0)
    got_q, got_k = OPS.rotary(q, key, angles.cos(), angles.sin())
    for x, got in ((q, got_q), (key, got_k)):
        plane = torch.complex(x[..., :half].double(), x[..., half : 2 * half].double())
        turned = plane * torch.exp(1j * angles.double()).unsqueeze(1)
        exact = torch.cat((turned.real, turned.imag, x[..., 2 * half :].double()), dim=-1)
        close(got, exact, dtype, ulps=4)
    assert torch.equal(heads[:, h + k :], heads[:, h + k :].clone()), "the values beside q and k stay"


@given(SIZES, st.integers(1, 40), DTYPES, SEEDS)
def test_gated_activations(t: int, n: int, dtype: torch.dtype, seed: int) -> None:
    x = draw(seed, t, 2 * n, dtype=dtype, scale=3.0)
    before = x.clone()
    gate, up = x[:, :n].double(), x[:, n:].double()
    close(OPS.silu_and_mul(x), gate / (1 + (-gate).exp()) * up, dtype, ulps=8)
    cubic = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    close(OPS.gelu_tanh_and_mul(x), 0.5 * gate * (1 + cubic.tanh()) * up, dtype, ulps=8)
    assert torch.equal(x, before), "the input is not changed"


@given(SIZES, SIZES, st.integers(1, 30), st.data())
def test_embedding_and_gather(t: int, n: int, vocab: int, data: st.DataObject) -> None:
    weight = draw(t, vocab, n)
    ids = data.draw(st.lists(st.integers(0, vocab - 1), min_size=t, max_size=t))
    expected = [weight[i].tolist() for i in ids]
    assert OPS.embedding(torch.tensor(ids), weight).tolist() == expected
    assert OPS.gather_rows(weight, torch.tensor(ids)).tolist() == expected


@given(st.integers(1, 6), SIZES, SIZES, SIZES, st.sampled_from([torch.float32, torch.bfloat16]), st.data())
def test_write_kv(blocks: int, size: int, k: int, d: int, cache_dtype: torch.dtype, data: st.DataObject) -> None:
    """Exactly the mapped positions change, to the new values in the cache's dtype."""
    slots = data.draw(st.lists(st.integers(0, blocks * size - 1), min_size=1, max_size=8, unique=True))
    heads = draw(1, len(slots), 2 * k, d)
    new_k, new_v = heads[:, :k], heads[:, k:]
    caches = [torch.full((blocks, size, k, d), torch.nan, dtype=cache_dtype) for _ in range(2)]
    OPS.write_kv(new_k, new_v, caches[0], caches[1], torch.tensor(slots))
    for cache, new in zip(caches, (new_k, new_v), strict=True):
        for position in range(blocks * size):
            written = cache[position // size, position % size]
            if position in slots:
                assert torch.equal(written, new[slots.index(position)].to(cache_dtype))
            else:
                assert written.isnan().all()


def test_write_kv_never_writes_to_a_copy() -> None:
    cache = torch.zeros(4, 2, 3, 5).transpose(0, 1)
    with pytest.raises(RuntimeError, match="view"):
        OPS.write_kv(torch.ones(1, 3, 5), torch.ones(1, 3, 5), cache, cache, torch.tensor([0]))
