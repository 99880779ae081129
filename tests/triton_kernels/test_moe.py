"""Router and experts: choices equal to the reference's, ties included; results against fp64 over drawn shapes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infer.backends.cuda import expert_sort
from infer.backends.cuda import moe as module
from infer.backends.cuda.expert_sort import sort_pairs
from infer.backends.cuda.launch import launch
from infer.backends.cuda.moe import Tile, moe
from infer.backends.cuda.router import topk_router
from infer.backends.reference.platform import OPS
from infer.plugins.platform import Routing
from triton_kernels.drawn import DTYPES, SEEDS, close, floats, inside_nan


@st.composite
def rules(draw: st.DrawFn) -> tuple[Routing, int]:
    """A rule and a number of experts that it fits."""
    scoring = draw(st.sampled_from(["softmax", "top_k_softmax", "sigmoid"]))
    groups = 1 if scoring == "top_k_softmax" else draw(st.sampled_from([1, 1, 2, 4, 5]))
    size = draw(st.integers(2, 7))
    top_groups = draw(st.integers(1, groups))
    rule = Routing(
        top_k=draw(st.integers(1, min(6, size * top_groups))),
        scoring=scoring,
        renormalize=draw(st.booleans()),
        num_groups=groups,
        top_groups=top_groups,
        group_score=draw(st.sampled_from(["max", "top2_sum"])),
        scale=draw(st.sampled_from([1.0, 2.5])),
    )
    return rule, size * groups


@given(rules(), st.integers(0, 5), st.booleans(), st.booleans(), DTYPES, SEEDS)
def test_router(rule_of: tuple[Routing, int], t: int, biased: bool, tied: bool, dtype: torch.dtype, seed: int) -> None:
    rule, experts = rule_of
    logits = floats(seed, t, experts, dtype=dtype, scale=3.0)
    logits = inside_nan(logits.round() if tied else logits)
    bias = floats(seed + 1, experts).round() if biased and rule.scoring != "top_k_softmax" else None
    tap = torch.full((t + 2, rule.top_k), 77, dtype=torch.uint8)
    weights, ids = topk_router(launch, logits, rule, bias, tap)
    expected, right = OPS.topk_router(logits, rule, bias, None)
    assert ids.dtype == torch.int64 and weights.dtype == torch.float32
    if not (tied and rule.scoring == "softmax" and bias is not None):  # rounding decides between scores that are tied
        assert torch.equal(ids, right)
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(tap[:t].long(), ids)
    assert (tap[t:] == 77).all()


def test_router_of_what_is_no_number() -> None:
    """Whatever a broken row holds, ids are experts and none is chosen twice; a tap may have any layout."""
    logits = torch.tensor([[math.nan] * 6, [-math.inf] * 6, [math.inf, math.nan, -0.0, 0.0, 1.0, -math.inf]])
    for scoring in ("softmax", "top_k_softmax", "sigmoid"):
        rule = Routing(top_k=4, scoring=scoring)  # type: ignore[arg-type]
        tap = torch.zeros(8, 3, dtype=torch.int32)[::2].t()
        ids = topk_router(launch, logits, rule, None, tap)[1]
        assert all(len(set(row)) == 4 and set(row) <= set(range(6)) for row in ids.tolist())
        assert torch.equal(tap.long(), ids)


@given(st.integers(0, 40), st.integers(1, 4), st.integers(1, 9), st.sampled_from([1, 4, 16]), SEEDS)
def test_pairs_by_expert(t: int, k: int, experts: int, tile: int, seed: int) -> None:
    """Every pair once, in the tiles of its expert, in the order of tokens; no tile of two experts."""
    ids = torch.randint(0, experts, (t, k), generator=torch.Generator().manual_seed(seed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_sort, "CHUNK", 16)
        found = sort_pairs(launch, ids, experts, tile)
    rows = found.pairs.view(-1, tile).tolist()
    for row, expert in zip(rows, found.experts.tolist(), strict=True):
        assert expert >= 0 or expert == -1
        if expert >= 0:
            assert all(ids.flatten()[pair] == expert for pair in row if pair < t * k)
    kept = [row for row, expert in zip(rows, found.experts.tolist(), strict=True) if expert >= 0]
    pairs = [pair for row in kept for pair in row if pair < t * k]
    assert pairs == sorted(range(t * k), key=lambda pair: (int(ids.flatten()[pair]), pair))


def exact(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t, row in enumerate(ids.tolist()):
        for k, expert in enumerate(row):
            gate, up = (gate_up[expert].double() @ x[t].double()).chunk(2)
            out[t] += weights[t, k].double() * (down[expert].double() @ (gate / (1 + (-gate).exp()) * up))
    return out


@given(
    st.integers(0, 20),
    st.integers(1, 3),
    st.integers(4, 6),
    st.integers(1, 40),
    st.integers(1, 20),
    DTYPES,
    st.booleans(),
    SEEDS,
)
def test_experts(t: int, k: int, experts: int, n: int, i: int, dtype: torch.dtype, invariant: bool, seed: int) -> None:
    """The weights of experts that nobody chose, and whatever lies beside the inputs, are NaN."""
    generator = torch.Generator().manual_seed(seed)
    x, weights = inside_nan(floats(seed, t, n, dtype=dtype)), floats(seed + 1, t, k).softmax(-1)
    ids = (
        torch.stack([torch.randperm(experts - 1, generator=generator)[:k] for _ in range(t)])
        if t
        else torch.zeros(0, k)
    )
    gate_up = inside_nan(floats(seed + 2, experts, 2 * i, n, dtype=dtype, scale=n**-0.5))
    down = inside_nan(floats(seed + 3, experts, n, i, dtype=dtype, scale=i**-0.5))
    gate_up[-1], down[-1] = math.nan, math.nan
    with pytest.MonkeyPatch.context() as patch:
        for name in ("FEW", "SOME", "FP32"):
            patch.setattr(module, name, Tile(4, 16, 8, 16, 4, 1))
        got = moe(launch, invariant, x, ids.long(), weights, gate_up, down)
    close(got, exact(x, ids.long(), weights, gate_up, down), dtype, ulps=32 if dtype == torch.float32 else 4)


def test_every_tile_gives_the_result() -> None:
    x, weights = floats(1, 9, 48, dtype=torch.float16), floats(2, 9, 2).softmax(-1)
    ids = torch.tensor([[i % 3, (i + 1) % 3] for i in range(9)])
    gate_up, down = (
        floats(3, 3, 80, 48, dtype=torch.float16, scale=0.1),
        floats(4, 3, 48, 40, dtype=torch.float16, scale=0.1),
    )
    right = exact(x, ids, weights, gate_up, down)
    for name in ("FEW", "SOME", "MANY"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "choose_tile", lambda *_, name=name, **__: getattr(module, name))
            close(moe(launch, False, x, ids, weights, gate_up, down), right, torch.float16, ulps=4)
