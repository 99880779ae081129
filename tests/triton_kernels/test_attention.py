"""Attention over a paged cache against fp64 loops: mixed rows, windows, softcap, eight bits, fixed parts; every invalid
position NaN."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention_cases import Case, attend, build, cases, oracle
from infer.backends.cuda import attention as module
from infer.backends.cuda.attention import Tile, attention
from infer.backends.cuda.device import DeviceFacts
from infer.backends.cuda.launch import launch

SMALL = DeviceFacts(multiprocessors=2, shared_memory=1 << 16, native_fp8=False)
LARGE = DeviceFacts(multiprocessors=132, shared_memory=232448, native_fp8=True, asynchronous_products=True)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles and parts of keys in every case."""
    monkeypatch.setattr(module, "DECODE", Tile(16, 16, 4, 1))
    monkeypatch.setattr(module, "PREFILL", Tile(32, 16, 4, 1))
    monkeypatch.setattr(module, "PREFILL_SMALL", Tile(32, 16, 4, 1))
    monkeypatch.setattr(module, "FP32", Tile(8, 8, 4, 1))
    monkeypatch.setattr(module, "INVARIANT", Tile(16, 8, 4, 1))
    monkeypatch.setattr(module, "INVARIANT_SPLIT", 16)
    monkeypatch.setattr(module, "MIN_SPLIT", 8)


def compare(case: Case, device: DeviceFacts, invariant: bool) -> torch.Tensor:
    if case.dtype == torch.bfloat16:  # the interpreter cannot
        case = dataclasses.replace(case, dtype=torch.float16)
    inputs = build(case)
    scale = 0.7 * case.head_size**-0.5
    got = attend(functools.partial(attention, launch, device, invariant), case, inputs, scale)
    exact = oracle(case, inputs, scale)
    tolerance = 2e-5 if case.dtype == torch.float32 else 5e-3
    assert got.shape == exact.shape and got.dtype == case.dtype
    torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=tolerance)
    return got


DEVICES = st.sampled_from([SMALL, LARGE])


@given(cases(), DEVICES, st.booleans())
def test_mixed_rows(case: Case, device: DeviceFacts, invariant: bool) -> None:
    compare(case, device, invariant)


@given(cases(), DEVICES, st.booleans())
def test_decode_alone(case: Case, device: DeviceFacts, invariant: bool) -> None:
    """Rows of one token have tiles and parts of their own."""
    compare(dataclasses.replace(case, rows=[(before, 1) for before, _ in case.rows]), device, invariant)


@pytest.mark.parametrize(("head_size", "value_size", "group"), [(24, 16, 1), (48, 48, 5), (192, 128, 3), (136, 8, 40)])
def test_heads_that_are_no_power_of_two(head_size: int, value_size: int, group: int) -> None:
    """Two products cover a head, and the query heads of one KV head fill more than a tile."""
    for rows in ([(5, 1), (30, 1)], [(5, 1), (7, 9)]):
        case = Case(rows, 2, group, head_size, value_size, 4, None, None, torch.float16, 3)
        compare(case, LARGE, False)


@given(st.integers(1, 70), st.none() | st.integers(1, 40), st.sampled_from([torch.float32, torch.float16]), st.data())
def test_a_token_has_the_same_bits_in_any_company(
    length: int, window: int | None, dtype: torch.dtype, data: st.DataObject
) -> None:
    """One row, alone as a prefill of everything, and its last token in chunks and as decode beside others."""
    case = Case([(0, length)], 2, 2, 8, 8, 4, window, None, dtype, 5)
    inputs = build(case)
    run = functools.partial(attention, launch, LARGE, True)
    whole = run(inputs.q, inputs.k_cache, inputs.v_cache, inputs.metadata, 0.3, window, None)
    chunk = data.draw(st.integers(1, length))
    other = data.draw(st.integers(1, length))
    meta = inputs.metadata
    rows = [(length, chunk)] if chunk > 1 else [(length, 1), (other, 1)]
    counts = [count for _, count in rows]
    starts = [0, *itertools.accumulate(counts)]
    parts = dataclasses.replace(
        meta,
        query_starts=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor([n for n, _ in rows], dtype=torch.int32),
        block_table=meta.block_table.expand(len(rows), -1).contiguous(),
        query_lens_host=counts,
        seq_lens_host=[n for n, _ in rows],
        num_decode_rows=0 if chunk > 1 else 2,
    )
    q = torch.cat([inputs.q[n - count : n] for n, count in rows])
    got = run(q, inputs.k_cache, inputs.v_cache, parts, 0.3, window, None)
    assert torch.equal(got[:chunk], whole[length - chunk :])


def test_a_padded_row_sees_nothing() -> None:
    """Graphs run with rows that hold no request: length 0. Their result is 0 and their neighbours' is right."""
    case = Case([(9, 1), (20, 1)], 1, 2, 8, 8, 4, None, None, torch.float32, 1)
    inputs = build(case)
    meta = inputs.metadata
    padded = dataclasses.replace(
        meta,
        query_starts=torch.arange(4, dtype=torch.int32),
        seq_lens=torch.cat((meta.seq_lens, torch.zeros(1, dtype=torch.int32))),
        block_table=torch.cat((meta.block_table, torch.zeros(1, meta.block_table.shape[1], dtype=torch.int32))),
        query_lens_host=[1, 1, 1],
        seq_lens_host=[*meta.seq_lens_host, 0],
        num_decode_rows=3,
    )
    q = torch.cat((inputs.q, inputs.q[:1]))
    for device, invariant in itertools.product((SMALL, LARGE), (False, True)):
        got = attention(launch, device, invariant, q, inputs.k_cache, inputs.v_cache, padded, 0.3, None, None)
        assert not got[2].any()
        torch.testing.assert_close(got[:2].double(), oracle(case, inputs, 0.3), rtol=2e-5, atol=2e-5)
