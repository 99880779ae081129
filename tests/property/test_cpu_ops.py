"""The native CPU kernels: right against fp64, and the same bits for a row whatever else is in the step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attention_cases import Case, attend, build, cases, oracle
from infer.backends.cpu.build import build_library
from infer.backends.cpu.library import Library
from infer.backends.cpu.ops import make_kernels, make_ops
from infer.plugins.platform import AttentionMetadata, Ops

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
SEEDS = st.integers(0, 2**31)


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def close(got: Tensor, exact: Tensor, dtype: torch.dtype, terms: int = 1) -> None:
    """Within a few roundings of the output dtype and of fp32 sums of `terms` products."""
    eps = torch.finfo(dtype).eps + terms**0.5 * torch.finfo(torch.float32).eps
    assert got.shape == exact.shape
    scale = exact.abs().max().clamp_min(1.0)
    assert ((got.double() - exact).abs() / scale).max() <= 4 * eps


@given(st.integers(1, 60), st.integers(1, 90), st.integers(1, 100), DTYPES, st.booleans(), SEEDS)
def test_linear(tables: dict[int, Ops], t: int, i: int, n: int, dtype: torch.dtype, biased: bool, seed: int) -> None:
    x, weight = draw(seed, t, i, dtype=dtype), draw(seed + 1, n, i, dtype=dtype)
    bias = draw(seed + 2, n, dtype=dtype) if biased else None
    pack, exact = tables[2].pack, x.double() @ weight.double().t() + (bias.double() if bias is not None else 0)
    assert pack is not None
    for form in (weight, pack(weight)):
        close(tables[2].linear(x, form, bias), exact, dtype, terms=i)
    logits = tables[2].head_logits
    assert logits is not None
    got = logits(x, pack(weight))
    assert got.dtype == torch.float32
    close(got, x.double() @ weight.double().t(), torch.float32, terms=i)


@given(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5), st.integers(1, 40), DTYPES, SEEDS)
def test_packing_can_be_undone(
    tables: dict[int, Ops], n: int, i: int, odd: int, rows: int, dtype: torch.dtype, seed: int
) -> None:
    weight = draw(seed, 16 * n + odd % 2, 2 * i + odd // 3, dtype=dtype)
    pack, unpack = tables[2].pack, tables[2].unpack
    assert pack is not None and unpack is not None
    packed = pack(weight)
    assert torch.equal(unpack(packed), weight)
    if weight.numel():
        ids = torch.randint(0, weight.shape[0], (rows,), generator=torch.Generator().manual_seed(seed))
        assert torch.equal(tables[1].embedding(ids, packed), weight[ids])


@given(st.integers(1, 70), st.sampled_from([7, 32, 576, 130]), st.sampled_from([16, 48, 65, 112]), DTYPES, SEEDS)
def test_a_row_of_linear_has_the_same_bits_in_any_company(
    tables: dict[int, Ops], t: int, i: int, n: int, dtype: torch.dtype, seed: int
) -> None:
    x, weight = draw(seed, t, i, dtype=dtype), draw(seed + 1, n, i, dtype=dtype)
    order = torch.randperm(t, generator=torch.Generator().manual_seed(seed))
    pack = tables[1].pack
    assert pack is not None
    for form in (weight, pack(weight)):
        whole = tables[2].linear(x, form, None)
        alone = torch.cat([tables[1].linear(x[row : row + 1], form, None) for row in range(t)])
        shuffled = tables[3].linear(x[order], form, None)
        assert torch.equal(whole, alone)
        assert torch.equal(whole[order], shuffled)


@given(st.integers(1, 40), st.integers(1, 90), DTYPES, st.booleans(), SEEDS)
def test_norms(tables: dict[int, Ops], t: int, n: int, dtype: torch.dtype, fp32_weight: bool, seed: int) -> None:
    x, residual = draw(seed, t, n, dtype=dtype, scale=3), draw(seed + 1, t, n, dtype=dtype)
    weight = draw(seed + 2, n, dtype=torch.float32 if fp32_weight else dtype)
    fused = tables[2].add_rms_norm
    assert fused is not None
    normed, total = fused(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    for got, source in ((normed, total), (tables[1].rms_norm(x, weight, 1e-5), x)):
        exact = source.double() / (source.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        close(got, exact, dtype)
    assert torch.equal(
        torch.cat([tables[1].rms_norm(x[r : r + 1], weight, 1e-5) for r in range(t)]),
        tables[3].rms_norm(x, weight, 1e-5),
    )


@given(st.integers(1, 20), st.integers(1, 90), DTYPES, st.floats(0.1, 30), SEEDS)
def test_gates(tables: dict[int, Ops], t: int, n: int, dtype: torch.dtype, scale: float, seed: int) -> None:
    x = draw(seed, t, 2 * n, dtype=dtype, scale=scale)
    gate, up = x.double().chunk(2, dim=-1)
    for got, activated in (
        (tables[2].silu_and_mul(x), torch.nn.functional.silu(gate)),
        (tables[2].gelu_tanh_and_mul(x), torch.nn.functional.gelu(gate, approximate="tanh")),
    ):
        eps = torch.finfo(dtype).eps + 3e-7
        torch.testing.assert_close(got.double(), activated * up, rtol=4 * eps, atol=4 * eps * scale)


@given(st.integers(1, 90), DTYPES, st.floats(0.1, 40), SEEDS)
def test_functions_of_one_number(tables: dict[int, Ops], n: int, dtype: torch.dtype, scale: float, seed: int) -> None:
    x = draw(seed, n, dtype=dtype, scale=scale)
    for op, exact in ((tables[2].sigmoid, torch.sigmoid), (tables[2].tanh, torch.tanh)):
        assert op is not None
        got = op(x)
        assert got.dtype == dtype
        close(got, exact(x.double()), dtype)
        assert torch.equal(got, torch.cat([op(x[i : i + 1]) for i in range(n)]))


@given(st.lists(st.integers(0, 130_000), min_size=1, max_size=40), st.integers(1, 40), st.floats(0.5, 2))
def test_angles(tables: dict[int, Ops], positions: list[int], size: int, factor: float) -> None:
    angles = tables[2].rotary_angles
    assert angles is not None
    frequencies = 10000.0 ** -(torch.arange(size) / size)
    at = torch.tensor(positions)
    exact = (at.float()[:, None] * frequencies).double()
    cos, sin = angles(at, frequencies, factor)
    torch.testing.assert_close(cos.double(), exact.cos() * factor, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(sin.double(), exact.sin() * factor, rtol=1e-6, atol=1e-6)
    alone = [angles(at[i : i + 1], frequencies, factor)[0] for i in range(len(positions))]
    assert torch.equal(cos, torch.cat(alone))


@given(
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 40),
    st.integers(0, 4),
    DTYPES,
    st.booleans(),
    SEEDS,
)
def test_rotary(
    tables: dict[int, Ops], t: int, h: int, k: int, half: int, rest: int, dtype: torch.dtype, apart: bool, seed: int
) -> None:
    """A rotation of the plane spanned by dimensions i and i + R; q and k may be pieces of one projection."""
    size = 2 * half + rest
    fused = draw(seed, t, h + 2 * k, size, dtype=dtype)
    q, key = fused[:, :h], fused[:, h : h + k]
    if apart:
        q, key = q.clone(), key.clone()
    angles = draw(seed + 1, t, half, scale=3)
    rotated = tables[2].rotary(q, key, angles.cos(), angles.sin())
    for got, source in zip(rotated, (q, key), strict=True):
        exact = source.double().clone()
        a, b, c, s = (
            source[..., :half].double(),
            source[..., half : 2 * half].double(),
            angles.cos()[:, None],
            angles.sin()[:, None],
        )
        exact[..., :half], exact[..., half : 2 * half] = a * c - b * s, b * c + a * s
        close(got, exact, dtype)
    assert torch.equal(fused[:, h + k :], draw(seed, t, h + 2 * k, size, dtype=dtype)[:, h + k :])


@given(cases(max_context=150))
def test_attention(tables: dict[int, Ops], case: Case) -> None:
    inputs = build(case)
    scale = 0.7 * case.head_size**-0.5
    got = attend(tables[2].attention, case, inputs, scale)
    exact = oracle(case, inputs, scale)
    assert got.shape == exact.shape and got.dtype == case.dtype
    tolerance = 2e-5 if case.dtype == torch.float32 else 3e-2
    torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=tolerance)


@given(cases(max_context=150), st.integers(0, 1500), st.integers(1, 40))
def test_a_token_attends_with_the_same_bits_however_its_prompt_is_cut(
    tables: dict[int, Ops], case: Case, before: int, count: int
) -> None:
    """One row of `count` tokens at once, against the same tokens one step after the other, and beside other rows."""
    case = replace(case, head_size=max(4, case.head_size), rows=[(before, max(2, count))])
    inputs = build(case)
    whole = attend(tables[2].attention, case, inputs, 0.3)
    single = []
    for token in range(max(2, count)):
        metadata = _row(inputs.metadata, before + token + 1)
        alone = replace(inputs, q=inputs.q[token : token + 1], metadata=metadata)
        single.append(attend(tables[1 + token % 3].attention, case, alone, 0.3))
    assert torch.equal(whole, torch.cat(single))


def _row(metadata: AttentionMetadata, length: int) -> AttentionMetadata:
    return AttentionMetadata(
        query_starts=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=torch.tensor([length], dtype=torch.int32),
        block_table=metadata.block_table,
        slot_mapping=metadata.slot_mapping[:1],
        query_lens_host=[1],
        seq_lens_host=[length],
        num_decode_rows=1,
    )


@given(st.integers(1, 30), st.integers(1, 6), st.integers(1, 3), DTYPES, SEEDS)
def test_experts(tables: dict[int, Ops], t: int, e: int, k: int, dtype: torch.dtype, seed: int) -> None:
    n, inner, k = 34, 20, min(k, e)
    x = draw(seed, t, n, dtype=dtype)
    gate_up, down = (
        draw(seed + 1, e, 2 * inner, n, dtype=dtype, scale=0.2),
        draw(seed + 2, e, n, inner, dtype=dtype, scale=0.2),
    )
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(e, generator=generator)[:k] for _ in range(t)])
    weights = torch.rand(t, k, generator=generator)
    moe = tables[2].moe
    alone = tables[1].moe
    assert moe is not None and alone is not None
    got = moe(x, ids, weights, gate_up, down)
    exact = torch.zeros(t, n, dtype=torch.float64)
    for token in range(t):
        for choice in range(k):
            expert = int(ids[token, choice])
            gate, up = (x[token].double() @ gate_up[expert].double().t()).chunk(2)
            exact[token] += weights[token, choice].double() * (
                (torch.nn.functional.silu(gate) * up) @ down[expert].double().t()
            )
    torch.testing.assert_close(
        got.double(),
        exact,
        rtol=0.03 if dtype == torch.bfloat16 else 1e-5,
        atol=0.05 if dtype == torch.bfloat16 else 1e-5,
    )
    rows = [alone(x[r : r + 1], ids[r : r + 1], weights[r : r + 1], gate_up, down) for r in range(t)]
    assert torch.equal(got, torch.cat(rows))


def test_threads_end_with_the_library(kernel_cache: Path) -> None:
    threads = Path("/proc/self/task")
    before = len(list(threads.iterdir()))
    library = Library(build_library(kernel_cache), 4)
    assert len(list(threads.iterdir())) == before + 3
    make_ops(*make_kernels(library)).linear(torch.ones(3, 64), torch.ones(640, 64), None)
    library.close()
    library.close()
    assert len(list(threads.iterdir())) == before
