"""Routing and experts of the reference and of the native kernels against definitions written token by token in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from infer.backends.cpu.build import build_library
from infer.backends.cpu.library import Library
from infer.backends.cpu.ops import make_kernels, make_ops
from infer.backends.reference.platform import OPS
from infer.plugins.platform import Ops, Routing

SEEDS = st.integers(0, 2**31)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


class Table:
    """The operations of one platform."""

    def __init__(self, ops: Ops, *, halves: bool) -> None:
        self.ops = ops
        self.halves = halves
        """It computes float16."""

    def route(
        self, logits: Tensor, rule: Routing, bias: Tensor | None = None, tap: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        assert self.ops.topk_router is not None
        return self.ops.topk_router(logits, rule, bias, tap)

    def experts(self, *args: Tensor) -> Tensor:
        assert self.ops.moe is not None
        return self.ops.moe(*args)


@pytest.fixture(scope="module", params=["reference", "native"])
def table(request: pytest.FixtureRequest, kernel_cache: Path) -> Iterator[Table]:
    if request.param == "reference":
        yield Table(OPS, halves=True)
        return
    library = Library(build_library(kernel_cache), 2)
    yield Table(make_ops(*make_kernels(library)), halves=False)
    library.close()


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def best(values: Sequence[float], count: int) -> list[int]:
    return sorted(range(len(values)), key=lambda i: -values[i])[:count]


def softmax(values: Sequence[float]) -> list[float]:
    largest = max(values)
    powers = [math.exp(v - largest) for v in values]
    return [p / sum(powers) for p in powers]


def one_token(logits: list[float], rule: Routing, bias: list[float]) -> tuple[list[float], list[int]]:
    """The definition, for one token."""
    scores = [1 / (1 + math.exp(-v)) for v in logits] if rule.scoring == "sigmoid" else softmax(logits)
    ranking = [s + b for s, b in zip(scores, bias, strict=True)]
    if rule.num_groups > 1:
        size = len(logits) // rule.num_groups
        groups = [ranking[g * size : (g + 1) * size] for g in range(rule.num_groups)]
        marks = [max(g) if rule.group_score == "max" else sum(sorted(g)[-2:]) for g in groups]
        allowed = best(marks, rule.top_groups)
        ranking = [r if i // size in allowed else -math.inf for i, r in enumerate(ranking)]
    ids = best(ranking, rule.top_k)
    weights = softmax([logits[i] for i in ids]) if rule.scoring == "top_k_softmax" else [scores[i] for i in ids]
    if rule.renormalize:
        weights = [w / sum(weights) for w in weights]
    return [w * rule.scale for w in weights], ids


@st.composite
def rules(draw: st.DrawFn) -> tuple[Routing, int]:
    """A rule and an expert count it fits."""
    scoring = draw(st.sampled_from(["softmax", "top_k_softmax", "sigmoid"]))
    size = draw(st.integers(2, 5))
    groups = 1 if scoring == "top_k_softmax" else draw(st.integers(1, 4))
    top_groups = draw(st.integers(1, groups))
    rule = Routing(
        top_k=draw(st.integers(1, size * top_groups)),
        scoring=cast(Any, scoring),
        renormalize=draw(st.booleans()),
        num_groups=groups,
        top_groups=top_groups,
        group_score=draw(st.sampled_from(["max", "top2_sum"])),
        scale=draw(st.sampled_from([1.0, 2.5])),
    )
    return rule, size * groups


@given(rules(), st.integers(0, 6), DTYPES, st.booleans(), SEEDS)
def test_router(
    table: Table, case: tuple[Routing, int], tokens: int, dtype: torch.dtype, biased: bool, seed: int
) -> None:
    rule, count = case
    assume(table.halves or dtype != torch.float16)
    logits = draw(seed, tokens, count, dtype=dtype) * 2
    biased = biased and rule.scoring == "sigmoid"
    bias = draw(seed + 1, count) * 0.3 if biased else None
    for row in logits.double().tolist():  # half-precision logits can tie, and then either answer is right
        assume(len(set(row)) == len(row))
    weights, ids = table.route(logits, rule, bias)
    assert weights.dtype == torch.float32 and ids.dtype == torch.int64
    assert tuple(weights.shape) == tuple(ids.shape) == (tokens, rule.top_k)
    zeros = [0.0] * count
    for t in range(tokens):
        exact, chosen = one_token(logits[t].double().tolist(), rule, zeros if bias is None else bias.double().tolist())
        assert ids[t].tolist() == chosen
        torch.testing.assert_close(weights[t].double(), torch.tensor(exact, dtype=torch.float64), rtol=1e-5, atol=1e-7)


def test_the_two_softmaxes_are_one_after_renormalising(table: Table) -> None:
    """Mixtral's paper takes the softmax of the chosen logits; transformers renormalises the softmax of all."""
    logits = draw(3, 50, 8)
    before, ids = table.route(logits, Routing(top_k=2, renormalize=True))
    after, same = table.route(logits, Routing(top_k=2, scoring="top_k_softmax"))
    assert torch.equal(ids, same)
    torch.testing.assert_close(before, after)


def test_router_scores_are_fp32_for_half_precision_logits(table: Table) -> None:
    """Rounded to bf16 first, softmax scores of 64 experts would tie and the order would be lost."""
    logits = torch.linspace(0, 0.25, 64).bfloat16().unique()[None]
    weights, ids = table.route(logits, Routing(top_k=4))
    assert ids.tolist() == [[logits.shape[1] - 1 - i for i in range(4)]]
    assert len(weights.unique()) == 4
    assert len(weights.bfloat16().unique()) < 4


@given(rules(), st.integers(1, 40), SEEDS)
def test_of_equal_scores_the_lower_id_comes_first(
    table: Table, case: tuple[Routing, int], tokens: int, seed: int
) -> None:
    """Also between groups: all logits are one of two numbers."""
    rule, count = case
    logits = torch.randint(0, 2, (tokens, count), generator=torch.Generator().manual_seed(seed)).float()
    weights, ids = table.route(logits, rule)
    for t in range(tokens):
        exact, chosen = one_token(logits[t].double().tolist(), rule, [0.0] * count)
        assert ids[t].tolist() == chosen
        torch.testing.assert_close(weights[t].double(), torch.tensor(exact, dtype=torch.float64), rtol=1e-5, atol=1e-7)


def test_sigmoid_scores_of_zero_do_not_divide_by_zero(table: Table) -> None:
    weights, _ = table.route(torch.full((1, 4), -200.0), Routing(top_k=2, scoring="sigmoid", renormalize=True))
    assert weights.tolist() == [[0.0, 0.0]]


@given(
    st.integers(0, 5), st.integers(0, 3), st.sampled_from([torch.uint8, torch.int16, torch.int32, torch.int64]), SEEDS
)
def test_tap(table: Table, tokens: int, spare: int, dtype: torch.dtype, seed: int) -> None:
    """The first rows become the ids, in a buffer that interleaves layers as well; the others stay."""
    logits, rule = draw(seed, tokens, 6), Routing(top_k=3)
    store = torch.full((tokens + spare, 2, 3), 99, dtype=dtype)
    weights, ids = table.route(logits, rule, None, store[:, 1])
    assert torch.equal(store[:tokens, 1].long(), ids)
    assert bool((store[tokens:] == 99).all()) and bool((store[:, 0] == 99).all())
    plain = table.route(logits, rule)
    assert torch.equal(plain[0], weights) and torch.equal(plain[1], ids)


def test_a_tap_that_is_too_short_is_an_error(table: Table) -> None:
    with pytest.raises(RuntimeError):
        table.route(draw(0, 5, 6), Routing(top_k=3), None, torch.zeros(4, 3, dtype=torch.uint8))


@given(st.integers(0, 7), st.integers(1, 9), st.integers(1, 6), st.integers(1, 5), st.data(), DTYPES, SEEDS)
def test_moe(
    table: Table, t: int, n: int, inner: int, count: int, data: st.DataObject, dtype: torch.dtype, seed: int
) -> None:
    assume(table.halves or dtype != torch.float16)
    k = data.draw(st.integers(1, count))
    x, gate_up = draw(seed, t, n, dtype=dtype), draw(seed + 1, count, 2 * inner, n, dtype=dtype)
    down, weights = draw(seed + 2, count, n, inner, dtype=dtype), draw(seed + 3, t, k)
    ids = draw(seed + 4, t, count).topk(k, dim=-1).indices
    kept = [a.clone() for a in (x, ids, weights, gate_up, down)]
    got = table.experts(x, ids, weights, gate_up, down)
    assert all(torch.equal(a, b) for a, b in zip((x, ids, weights, gate_up, down), kept, strict=True))
    assert got.dtype == dtype and tuple(got.shape) == (t, n)
    exact = torch.zeros(t, n, dtype=torch.float64)
    size = torch.zeros(t, n, dtype=torch.float64)
    for row in range(t):
        for weight, expert in zip(weights[row].double(), ids[row].tolist(), strict=True):
            gate, up = (gate_up[expert].double() @ x[row].double()).chunk(2)
            part = down[expert].double() @ (gate * gate.sigmoid() * up)
            exact[row] += weight * part
            size[row] += (weight * (down[expert].double().abs() @ (gate * gate.sigmoid() * up).abs())).abs()
    eps = torch.finfo(dtype).eps
    # Products, activation and output are rounded to the dtype; gate and up may cancel inside.
    assert bool(((got.double() - exact).abs() <= 16 * eps * (size + 1)).all())


def test_experts_that_nobody_chose_are_not_read(table: Table) -> None:
    gate_up, down = draw(0, 4, 6, 5), draw(1, 4, 5, 3)
    x, ids, weights = draw(2, 3, 5), torch.tensor([[0, 2], [2, 0], [0, 2]]), torch.rand(3, 2)
    expected = table.experts(x, ids, weights, gate_up, down)
    for unused in (1, 3):
        gate_up[unused] = torch.nan
        down[unused] = torch.nan
    assert torch.equal(table.experts(x, ids, weights, gate_up, down), expected)
    assert bool(expected.isfinite().all())


def test_half_precision_experts_are_added_up_in_fp32(table: Table) -> None:
    """1000 + 0.25 * 4 in bf16 steps of 4 would lose every quarter."""
    down = torch.tensor([1000.0, 0.25, 0.25, 0.25, 0.25, -1000.0]).bfloat16()[:, None, None]
    gate_up = torch.tensor([[64.0], [1 / 64.0]]).bfloat16().expand(6, 2, 1).contiguous()
    out = table.experts(torch.ones(1, 1).bfloat16(), torch.arange(6)[None], torch.ones(1, 6), gate_up, down)
    assert out.item() == 1.0


@given(st.integers(1, 6), SEEDS)
def test_tokens_do_not_see_each_other(table: Table, t: int, seed: int) -> None:
    x, gate_up, down = draw(seed, t, 8), draw(seed + 1, 4, 12, 8), draw(seed + 2, 4, 8, 6)
    ids, weights = draw(seed + 3, t, 4).topk(2, dim=-1).indices, torch.rand(t, 2)
    together = table.experts(x, ids, weights, gate_up, down)
    alone = torch.cat(
        [table.experts(x[i : i + 1], ids[i : i + 1], weights[i : i + 1], gate_up, down) for i in range(t)]
    )
    torch.testing.assert_close(together, alone)
