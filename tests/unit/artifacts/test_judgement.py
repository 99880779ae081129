"""Verdicts over arrays: what counts as equal, as a near tie and as wrong, and which place is named first."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer import Choice, Completion, SamplingParams, TokenLogprob, Usage
from infer.artifacts import ArtifactChoice, GenerationArtifact, RoutedExperts, SelectedLogprobs
from infer.artifacts.judgement import Tolerance, judge_logprobs, judge_routes, judge_tokens, worst
from infer.artifacts.verify import verify_artifact
from infer.errors import ArtifactError
from infer.types import CapturedRows

TIGHT = Tolerance(near=1e-2, mean=1.0)
TOKENS = np.arange(100, 112)


def routes(ids: Any, start: int = 0, layers: tuple[int, ...] = (3, 7)) -> RoutedExperts:
    return RoutedExperts(start, np.asarray(ids), layers, (8,) * len(layers))


def test_log_probabilities_by_their_distance() -> None:
    ours = np.linspace(-5, -1, 12)
    recorded = ours.copy()
    recorded[[4, 9]] += [0.005, -0.5]
    judged = judge_logprobs(TOKENS, recorded, ours, 30, TIGHT)
    assert (judged.verdict, judged.equal, judged.near, judged.wrong, judged.checked) == ("wrong", 10, 1, 1, 12)
    assert (judged.near_positions, judged.wrong_positions) == ((34,), (39,))
    assert judged.first is not None and (judged.first.position, judged.first.token_id) == (34, 104)
    assert judged.first_wrong is not None and judged.first_wrong.deviation == pytest.approx(0.5)
    assert judged.first_wrong.recorded == pytest.approx(recorded[9]) and judged.first_wrong.ours == ours[9]
    assert judged.max_deviation == pytest.approx(0.5) and judged.mean_deviation == pytest.approx(0.505 / 12)


def test_less_likely_tokens_may_be_further_apart() -> None:
    tolerance = Tolerance(near=0.1, relative=0.1, mean=9.0)
    judged = judge_logprobs([1, 2], [-1.3, -10.9], [-1.0, -10.0], 0, tolerance)
    assert (judged.wrong_positions, judged.near_positions) == ((0,), (1,))


def test_a_drift_that_is_small_everywhere_is_wrong_on_average() -> None:
    ours = np.full(12, -2.0)
    tolerance = Tolerance(near=0.25, mean=0.08)
    assert judge_logprobs(TOKENS, ours + 0.05, ours, 0, tolerance).verdict == "near tie"
    judged = judge_logprobs(TOKENS, ours + 0.2, ours, 0, tolerance)
    assert (judged.verdict, judged.near, judged.wrong) == ("wrong", 12, 0)


@pytest.mark.parametrize("values", [(-np.inf, -1.0), (-1.0, -np.inf), (np.nan, -1.0), (-np.inf, -np.inf)])
def test_what_is_not_finite_is_wrong(values: tuple[float, float]) -> None:
    judged = judge_logprobs([7], [values[0]], [values[1]], 0, Tolerance.of("bfloat16"))
    assert judged.verdict == "wrong"


def test_the_coarsest_dtype_sets_the_tolerance() -> None:
    assert Tolerance.of("float32", "bfloat16") == Tolerance.of("bfloat16", "float16") == Tolerance.of("bfloat16")
    assert Tolerance.of("float32").near < Tolerance.of("float16").near < Tolerance.of("bfloat16").near
    with pytest.raises(ArtifactError, match="no tolerance for 'int8'"):
        Tolerance.of("float32", "int8")


def test_lengths_must_agree() -> None:
    with pytest.raises(ArtifactError, match="2 recorded and 3 own"):
        judge_logprobs([1, 2, 3], [-1.0, -1.0], [-1.0] * 3, 0, TIGHT)


def test_greedy_tokens_by_the_gap() -> None:
    judged = judge_tokens([5, 6, 7, 8], [5, 9, 7, 3], [0.0, 0.004, 0.0, 1.5], 10, TIGHT)
    assert (judged.equal, judged.near_positions, judged.wrong_positions) == (2, (11,), (13,))
    assert judged.first is not None and (judged.first.recorded, judged.first.ours) == (6, 9)
    assert judged.first_wrong is not None and (judged.first_wrong.ours, judged.first_wrong.deviation) == (3, 1.5)


ROUTES = np.array([[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[1, 0], [3, 2]]])


@pytest.mark.row("X-VERIFY", "routes are compared in order; the first differing row and layer are named")
def test_routes() -> None:
    tokens = np.arange(50, 54)
    same = judge_routes(tokens, routes(ROUTES), routes(ROUTES), TIGHT)
    assert (same.verdict, same.equal) == ("equal", 6)
    other = ROUTES.copy()
    other[1, 1] = [7, 6]
    swapped = judge_routes(tokens, routes(ROUTES), routes(other), TIGHT)
    assert (swapped.verdict, swapped.near, swapped.near_positions) == ("near tie", 1, (1,))
    other[2, 0] = [1, 4]
    judged = judge_routes(tokens, routes(ROUTES), routes(other), TIGHT)
    assert (judged.verdict, judged.near, judged.wrong, judged.wrong_positions) == ("wrong", 1, 1, (2,))
    first, wrong = judged.first, judged.first_wrong
    assert first is not None and (first.position, first.layer, first.token_id) == (1, 7, 51)
    assert wrong is not None and (wrong.position, wrong.layer, wrong.token_id) == (2, 3, 52)
    assert (wrong.recorded, wrong.ours) == ([1, 0], [1, 4])


def test_rare_flips_may_be_near_ties_of_the_router() -> None:
    other = ROUTES.copy()
    other[2, 0] = [1, 4]
    for share, verdict in ((1 / 6, "near tie"), (0.1, "wrong")):
        tolerance = Tolerance(near=1.0, mean=1.0, route_flips=share)
        assert judge_routes(range(4), routes(ROUTES), routes(other), tolerance).verdict == verdict


@given(st.integers(0, 2), st.integers(0, 2), st.integers(0, 2), st.integers(0, 1))
def test_rows_and_layers_are_compared_where_both_have_them(first: int, ours: int, row: int, layer: int) -> None:
    """Recorded from `first` on, replayed from `ours` on, the layers in another order."""
    other = ROUTES.copy()
    other[row, layer] = [0, 7]
    mine = RoutedExperts(ours, other[ours:][:, ::-1], (7, 3), (8, 8))
    judged = judge_routes(range(4), routes(ROUTES[first:], first), mine, TIGHT)
    start = max(first, ours)
    assert judged.checked == (3 - start) * 2
    assert judged.wrong_positions == ((row,) if row >= start else ())
    if row >= start:
        assert judged.first_wrong is not None and judged.first_wrong.layer == (3, 7)[layer]


def test_another_model_is_no_matter_of_tolerance() -> None:
    with pytest.raises(ArtifactError, match=r"layers 3, 7.*layers 3, 8.*another model"):
        judge_routes(range(4), routes(ROUTES), routes(ROUTES, layers=(3, 8)), TIGHT)
    with pytest.raises(ArtifactError, match=r"choose 2 experts.*choose 1"):
        judge_routes(range(4), routes(ROUTES), routes(ROUTES[..., :1]), TIGHT)
    with pytest.raises(ArtifactError, match="up to position 3, the replay up to 2"):
        judge_routes(range(4), routes(ROUTES), routes(ROUTES[:2]), TIGHT)


def test_the_worst_counts() -> None:
    near = judge_tokens([1], [2], [0.001], 0, TIGHT)
    wrong = judge_tokens([1], [2], [1.0], 0, TIGHT)
    assert worst([None, near]) == "near tie" and worst([near, wrong]) == "wrong" and worst([None]) == "equal"


class Replayer:
    """An engine that answers every forced request with the same values and routes."""

    def __init__(self, rows: CapturedRows | None) -> None:
        self.rows = rows
        self.asked: list[SamplingParams] = []

    async def generate_many(self, prompts: Any, params: Any, /) -> list[Completion]:
        self.asked += params
        made = []
        for prompt, asked in zip(prompts, params, strict=True):
            entries = tuple(TokenLogprob(i, -1.0, 1, ((i, -1.0),)) for i in asked.forced_token_ids)
            captured = {} if self.rows is None else {"moe_routes": self.rows}
            choice = Choice(0, "", asked.forced_token_ids, "length", None, entries, captured=captured)
            made.append(Completion("r", tuple(prompt), (choice,), Usage(1, 1), asked))
        return made


def captured(ids: Any, **more: Any) -> CapturedRows:
    data = np.asarray(ids, dtype=np.uint8)
    settings = {"start": 0, "count": len(data), "layer_ids": (3, 7), "num_experts": 8} | more
    return CapturedRows(field="moe_routes", data=data.tobytes(), dtype="u1", row_shape=data.shape[1:], **settings)


@pytest.mark.anyio
async def test_a_replay_asks_for_routes_where_the_artifact_has_some() -> None:
    values = SelectedLogprobs(2, [-1.0, -1.0])
    artifact = GenerationArtifact(
        [
            ArtifactChoice(0, 2, [5, 6, 7, 8], routes(ROUTES), values),
            ArtifactChoice(1, 2, [5, 6, 9, 9], None, values),
        ]
    )
    engine = Replayer(captured(ROUTES))
    report = await verify_artifact(artifact, engine, params=SamplingParams(n=3, max_tokens=1, stop="x", top_k=7))
    assert report.verdict == "equal"
    assert [choice.routes is not None for choice in report.choices] == [True, False]
    assert [one.return_routed_experts for one in engine.asked] == [True, False]
    assert [one.forced_token_ids for one in engine.asked] == [(7, 8), (9, 9)]
    assert (engine.asked[0].n, engine.asked[0].stop, engine.asked[0].top_k) == (1, (), 7)
    engine = Replayer(captured(ROUTES + 1))
    report = await verify_artifact(artifact, engine)
    assert report.verdict == "wrong"
    judged = report.choices[0].routes
    assert judged is not None and judged.first_wrong is not None
    assert (judged.first_wrong.position, judged.first_wrong.layer) == (0, 3)
    assert report.choices[0].logprobs is not None and report.choices[0].logprobs.verdict == "equal"


@pytest.mark.anyio
@pytest.mark.parametrize("rows", [None, captured(ROUTES[:0], error="the store was full")])
async def test_routes_that_the_engine_has_not_are_not_judged_equal(rows: CapturedRows | None) -> None:
    artifact = GenerationArtifact([ArtifactChoice(0, 2, [5, 6, 7, 8], routes(ROUTES))])
    with pytest.raises(ArtifactError, match="returned none" if rows is None else "the store was full"):
        await verify_artifact(artifact, Replayer(rows))
    report = await verify_artifact(artifact, Replayer(None), routes_of=lambda done: routes(ROUTES))
    assert report.verdict == "equal" and report.tolerance == Tolerance.of("float32")
