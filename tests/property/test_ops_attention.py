"""Attention over a paged cache against fp64 loops: mixed rows, windows, softcap, every invalid position NaN."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention_cases import Case, attend, build, cases, oracle
from infer.backends.reference import attention as module
from infer.backends.reference.platform import OPS


def compare(case: Case) -> None:
    inputs = build(case)
    scale = 0.7 * case.head_size**-0.5
    exact = oracle(case, inputs, scale)
    tolerance = 2e-5 if case.dtype == torch.float32 else 3e-2
    for _ in range(2):  # the second layer of a step finds the plan in the metadata
        got = attend(OPS.attention, case, inputs, scale)
        assert got.shape == exact.shape and got.dtype == case.dtype
        torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=tolerance)


@given(cases())
def test_attention(case: Case) -> None:
    compare(case)


@given(cases(), st.integers(1, 7), st.integers(1, 90))
def test_attention_in_small_pieces(case: Case, queries: int, tokens: int) -> None:
    """The bounds on mask and gather cut the work; no cut shows in the result."""
    with mock.patch.multiple(module, PREFILL_QUERIES=queries, DECODE_TOKENS=tokens):
        compare(case)


@pytest.mark.parametrize("window", [None, 100])
def test_decode_rows_of_very_different_lengths(window: int | None) -> None:
    """Short rows are not padded to the longest: they are gathered in groups of similar length."""
    rows = [(before, 1) for before in (1500, 3, 700, 0, 64, 1400, 12, 1, 130, 2)]
    case = Case(rows, 1, 3, 8, 8, 16, window, None, torch.float32, 7)
    inputs = build(case)
    OPS.attention(inputs.q, inputs.k_cache, inputs.v_cache, inputs.metadata, 0.5, window, None)
    (plan,) = inputs.metadata.scratch.values()
    spans = [min(length, window or length) for length in case.lengths]
    gathered = sum(part.slots.numel() for part in plan.decode)
    assert gathered <= 2 * sum(spans) + 64 * len(rows)
    compare(case)
    compare(Case([*rows, (200, 30), (0, 70)], 2, 2, 8, 12, 16, window, None, torch.float32, 8))
