"""The native draw against its definition in float64: which tokens are left, and that the number falls on the one drawn."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from infer.backends.cpu.platform import create
from infer.engine.sampling.draw import FusedDraw, MaskedDraw
from infer.engine.sampling.row import Feature, make_row
from infer.engine.sampling.sampler import sample
from infer.engine.step import SamplingSpec

SLACK = 2e-6
"""Of probability: weights are fp32, their sums double."""


@functools.cache
def native() -> FusedDraw:
    draw = create(2).ops.draw
    assert draw is not None
    return draw


@functools.cache
def native_masked() -> MaskedDraw:
    draw = create(2).ops.draw_allowed
    assert draw is not None
    return draw


@functools.cache
def native_best() -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    best = create(2).ops.best
    assert best is not None
    return best


def left_over(x: NDArray[np.float64], temperature: float, k: int, p: float, min_p: float) -> list[list[int]]:
    """The sets of ids, ascending, that may be left: one, or two where rounding decides whether `p` is reached."""
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if 0 < k < len(x):
        order = order[:k]
    weights = np.exp((x[order] - x[order[0]]) / temperature)
    shares = weights / weights.sum()
    before = np.concatenate(([0.0], np.cumsum(shares)[:-1]))
    found = []
    for limit in {p - SLACK, p, p + SLACK}:
        count = max(1, int((before < limit).sum())) if p < 1 else len(order)
        for floor in {min_p * (1 - SLACK), min_p * (1 + SLACK)}:
            kept = sorted(i for i, w in zip(order[:count], weights[:count], strict=True) if w >= floor or i == order[0])
            if kept not in found:
                found.append(kept)
    return found


def falls_on(x: NDArray[np.float64], temperature: float, kept: list[int], number: float, token: int) -> bool:
    if token not in kept:
        return False
    weights = np.exp((x[kept] - x[kept].max()) / temperature)
    shares = np.cumsum(weights / weights.sum())
    place = kept.index(token)
    start = shares[place - 1] if place else 0.0
    return bool(start - SLACK <= number <= shares[place] + SLACK)


ROWS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.1, 0.7, 1.0, 1.7, 30.0]),
        "top_k": st.sampled_from([0, 1, 2, 7, 50, 400, 100_000]),
        "top_p": st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.05, 1e-9]),
        "min_p": st.sampled_from([0.0, 0.01, 0.5, 1.0]),
        "number": st.floats(0, 1, exclude_max=True) | st.sampled_from([0.0, 1 - 2**-53]),
        "kind": st.sampled_from(["wide", "flat", "ties", "masked", "one"]),
    }
)


def logits_of(kind: str, width: int, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(width, generator=draw) * {"flat": 0.01}.get(kind, 4.0)
    if kind == "ties":
        x = (x * 2).round() / 2
    if kind == "masked":
        x[torch.rand(width, generator=draw) < 0.7] = -math.inf
        x[seed % width] = 1.0
    if kind == "one":
        x[:] = -math.inf
        x[seed % width] = -3.0
    return x


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([1, 5, 16, 127, 129, 1000, 4097]), st.lists(ROWS, min_size=1, max_size=6), st.integers(0, 99))
def test_the_number_falls_on_a_token_that_is_left(width: int, rows: list[dict[str, object]], seed: int) -> None:
    draw = native()
    logits = torch.stack([logits_of(str(row["kind"]), width, seed + i) for i, row in enumerate(rows)])
    untouched = logits.clone()
    order = list(range(len(rows)))[::-1]

    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([rows[i][name] for i in order], dtype=dtype)

    numbers = column("number", torch.float64)
    given_columns = (
        column("temperature", torch.float32),
        column("top_k", torch.int64),
        column("top_p", torch.float64),
        column("min_p", torch.float32),
        numbers,
    )
    ids = draw(logits, torch.tensor(order), *given_columns).tolist()
    assert torch.equal(logits, untouched)
    for place, (i, token) in enumerate(zip(order, ids, strict=True)):
        row, x = rows[i], logits[i].double().numpy()
        temperature = float(np.float32(row["temperature"]))  # type: ignore[arg-type]
        sets = left_over(x, temperature, int(row["top_k"]), float(row["top_p"]), float(np.float32(row["min_p"])))  # type: ignore[call-overload, arg-type]
        assert x[token] > -math.inf
        assert any(falls_on(x, temperature, kept, float(numbers[place]), token) for kept in sets), (row, token)
        alone = draw(logits[i : i + 1], torch.tensor([0]), *[values[place : place + 1] for values in given_columns])
        assert alone.tolist() == [token]


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([1, 5, 16, 127, 1023, 1024, 1040, 4097]),
    st.lists(st.sampled_from(["wide", "flat", "ties", "masked", "one", "nothing", "NaN"]), min_size=1, max_size=6),
    st.integers(0, 99),
)
def test_the_best_is_the_first_of_the_highest(width: int, kinds: list[str], seed: int) -> None:
    best = native_best()
    logits = torch.stack([logits_of(kind, width, seed + i) for i, kind in enumerate(kinds)])
    for row, kind in zip(logits, kinds, strict=True):
        if kind == "nothing":
            row[:] = -math.inf
        if kind == "NaN":
            row[torch.randint(width, (2,), generator=torch.Generator().manual_seed(seed))] = math.nan
    ids, values = best(logits)
    assert ids.tolist() == logits.numpy().argmax(axis=-1).tolist()
    assert torch.equal(values.nan_to_num(7.5), logits[torch.arange(len(kinds)), ids].nan_to_num(7.5))


MASKED_ROWS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.1, 1.0, 1.7]),
        "top_k": st.sampled_from([0, 1, 2, 7, 400]),
        "top_p": st.sampled_from([1.0, 0.9, 0.5, 1e-9]),
        "min_p": st.sampled_from([0.0, 0.01, 1.0]),
        "number": st.floats(0, 1, exclude_max=True) | st.sampled_from([0.0, 1 - 2**-53]),
        "kind": st.sampled_from(["wide", "flat", "ties", "masked", "one"]),
        "density": st.sampled_from([0.0, 0.01, 0.5, 0.99, 1.0]),
    }
)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([1, 5, 31, 32, 33, 127, 1000, 4097]),
    st.lists(MASKED_ROWS, min_size=1, max_size=6),
    st.integers(0, 99),
)
def test_a_draw_among_allowed_tokens_is_one_over_a_row_without_the_others(
    width: int, rows: list[dict[str, Any]], seed: int
) -> None:
    """Bits behind the last token say nothing."""
    draw = native_masked()
    random = np.random.default_rng(seed)
    logits = torch.stack([logits_of(row["kind"], width, seed + i) for i, row in enumerate(rows)])
    untouched = logits.clone()
    bits = np.stack([random.random(-(-width // 32) * 32) < row["density"] for row in rows])
    columns = (
        torch.arange(len(rows)),
        torch.tensor([row["temperature"] for row in rows], dtype=torch.float32),
        torch.tensor([row["top_k"] for row in rows]),
        torch.tensor([row["top_p"] for row in rows], dtype=torch.float64),
        torch.tensor([row["min_p"] for row in rows], dtype=torch.float32),
        torch.tensor([row["number"] for row in rows], dtype=torch.float64),
        torch.from_numpy(np.packbits(bits, axis=1, bitorder="little")),
    )
    ids = draw(logits, *columns).tolist()
    assert torch.equal(logits, untouched)
    for i, (row, token) in enumerate(zip(rows, ids, strict=True)):
        x = np.where(bits[i, :width], logits[i].double().numpy(), -math.inf)
        if not (x > -math.inf).any():
            assert token == -1
            continue
        if row["temperature"] == 0.0:
            assert token == int(x.argmax())
            continue
        assert x[token] > -math.inf
        temperature = float(np.float32(row["temperature"]))
        sets = left_over(x, temperature, row["top_k"], row["top_p"], float(np.float32(row["min_p"])))
        assert any(falls_on(x, temperature, kept, row["number"], token) for kept in sets), (row, token)
        alone = [values[i : i + 1] for values in columns]
        assert draw(logits, *alone).tolist() == [token]


@pytest.mark.parametrize("shape", [(2, 8), (1, 12), (2, 16), (2, 12, 1)])
def test_masks_of_another_size_are_refused(shape: tuple[int, ...]) -> None:
    two = torch.zeros(2, dtype=torch.int64)
    columns = two, two.float(), two, two.double() + 1, two.float(), two.double()
    with pytest.raises(ValueError, match=r"uint8 \(2, 12\) is needed"):
        native_masked()(torch.zeros(1, 70), *columns, torch.zeros(shape, dtype=torch.uint8))


def test_shares_of_a_real_vocabulary_are_met() -> None:
    """Ten thousand numbers over one row: how often each of the likely tokens comes."""
    draw = native()
    width, count = 49_152, 10_000
    logits = torch.randn(1, width, generator=torch.Generator().manual_seed(0)) * 3
    numbers = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    same = torch.zeros(count, dtype=torch.int64)
    ids = draw(
        logits,
        same,
        torch.full((count,), 0.8),
        same + 40,
        torch.full((count,), 0.95, dtype=torch.float64),
        torch.zeros(count),
        numbers,
    )
    (kept, *_) = left_over(logits[0].double().numpy(), float(np.float32(0.8)), 40, 0.95, 0.0)
    shares = torch.softmax(logits[0, kept].double() / float(np.float32(0.8)), 0)
    found = torch.bincount(ids, minlength=width)[kept] / count
    assert sum(torch.bincount(ids, minlength=width)) == count and set(ids.tolist()) <= set(kept)
    assert torch.allclose(found.double(), shares, atol=2 / count)


def row_of(**settings_: object) -> object:
    row = make_row(SamplingSpec(**settings_), [1, 2], 2, 300, torch.device("cpu"))  # type: ignore[arg-type]
    return row


@pytest.mark.parametrize(
    "asked",
    [
        {"logit_bias": ((3, 50.0),)},
        {"allowed_token_ids": (3, 4)},
        {"repetition_penalty": 1.5},
        {"logprobs": 1, "logprobs_mode": "processed"},
        {"forced_token_ids": (9,)},
        {"return_kept_set": True, "logprobs": 0},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_rows_that_ask_for_more_are_not_drawn_by_the_platform(asked: dict[str, object]) -> None:
    seen: list[int] = []

    def fused(logits: torch.Tensor, rows: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        seen.extend(rows.tolist())
        return native()(logits, rows, *rest)

    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(1))
    rows = [row_of(seed=1, temperature=0.9, top_p=0.9), row_of(seed=2, **asked), row_of(seed=3, logprobs=2)]
    assert all(row.features & Feature.RANDOM for row in rows)  # type: ignore[attr-defined]
    drawn = sample(logits, rows, fused)  # type: ignore[arg-type]
    assert seen == [0, 2]
    plain = sample(logits, rows)  # type: ignore[arg-type]
    assert drawn.token_ids == plain.token_ids and drawn.logprobs.keys() == plain.logprobs.keys()


def test_a_row_that_cannot_be_sampled_is_not_given_to_the_platform() -> None:
    logits = torch.randn(3, 300)
    logits[1, 5] = math.nan
    rows = [row_of(seed=i) for i in range(3)]
    drawn = sample(logits, rows, native())  # type: ignore[arg-type]
    assert drawn.errors.keys() == {1} and drawn.token_ids[1] == -1 and min(drawn.token_ids[0], drawn.token_ids[2]) >= 0
