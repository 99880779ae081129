"""What trainers are told of a step: kept sets against a filter written in numpy, candidates against a full log-softmax, and
forced ids. Every row of a batch has its own settings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from infer.engine.sampling.sampler import Sampled, sample
from infer.engine.step import SamplingSpec
from infer.types import LogprobsMode
from unit.engine.sampling.settings import processed, row_of

Floats = NDArray[np.float64]
IDS = [4, 9, 9, 30]
MARGIN = 1e-6
"""A cumulated probability so close to top_p may fall on either side of it in fp32."""

VOCABS = st.sampled_from([33, 200, 5_000])
TRUNCATIONS = st.fixed_dictionaries(
    {},
    optional={
        "top_k": st.sampled_from([1, 2, 7, 40, 32, 10_000]),
        "top_p": st.sampled_from([0.05, 0.5, 0.9, 0.999]),
        "min_p": st.sampled_from([0.001, 0.02, 0.3]),
    },
)
SHAPINGS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.3, 1.0, 1.8]),
        "repetition_penalty": st.sampled_from([0.7, 1.5]),
        "presence_penalty": st.floats(-2, 2),
        "logit_bias": st.just(((3, 4.0), (30, -6.0))),
        "allowed_token_ids": st.just(tuple(range(0, 33, 2))),
        "bad_words": st.just(((5,), (30, 7))),
    },
)


def randn(rows: int, vocab: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def run(logits: torch.Tensor, specs: list[SamplingSpec]) -> Sampled:
    out = sample(logits, [row_of(spec, IDS, 2, logits.shape[-1]) for spec in specs])
    assert out.errors == {}
    return out


def softmax(scores: Floats) -> Floats:
    weights = np.exp(scores - scores.max())
    return np.asarray(weights / weights.sum())


def numpy_filter(scores: Floats, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> set[int]:
    """The ids that stay: top_k, then top_p of what is left, then min_p of that; of equal scores the lowest id first."""
    order = np.lexsort((np.arange(len(scores)), -scores))
    order = order[np.isfinite(scores[order])]
    if top_k:
        order = order[:top_k]
    if top_p < 1:
        before = np.concatenate(([0.0], np.cumsum(softmax(scores[order]))[:-1]))
        assume(np.abs(before - top_p).min() > MARGIN)
        order = order[before < top_p]
    if min_p:
        chances = softmax(scores[order])
        assume(np.abs(chances / chances.max() - min_p).min() > MARGIN)
        order = order[chances >= min_p * chances.max()]
    return set(order.tolist())


@pytest.mark.row("X-KEPT-SET", "the set equals an independent numpy filter on the same logits")
@given(VOCABS, st.integers(0, 10**6), st.lists(st.tuples(SHAPINGS, TRUNCATIONS), min_size=1, max_size=4))
def test_the_kept_set_equals_a_numpy_filter(
    vocab: int, seed: int, cases: list[tuple[dict[str, Any], dict[str, Any]]]
) -> None:
    """And its mass is the probability of these ids before the filters, whatever else shaped the logits."""
    logits = randn(len(cases), vocab, seed)
    specs = [SamplingSpec(seed=i, logprobs=0, return_kept_set=True, **(a | b)) for i, (a, b) in enumerate(cases)]
    out = run(logits, specs)
    for i, (shaping, truncation) in enumerate(cases):
        before = processed(SamplingSpec(seed=0, **shaping), IDS, 2, logits[i]).double().numpy()
        expected = numpy_filter(before, **truncation)
        entry = out.logprobs[i]
        kept = set(range(vocab)) if entry.kept_ids is None else set(entry.kept_ids)
        assert kept == expected
        assert entry.kept_ids is None or list(entry.kept_ids) == sorted(kept)
        assert entry.token_id in kept
        assert entry.kept_logmass == pytest.approx(np.log(softmax(before)[sorted(kept)].sum()), abs=1e-5)


@pytest.mark.row("X-KEPT-SET", "processed logprob = raw - log(mass) within 1e-5 at temperature 1")
@given(VOCABS, st.integers(0, 10**6), TRUNCATIONS)
def test_processed_is_raw_less_the_log_mass(vocab: int, seed: int, truncation: dict[str, Any]) -> None:
    logits = randn(6, vocab, seed)
    settings: dict[str, Any] = {"logprobs": 3, "return_kept_set": True, **truncation}
    raw = run(logits, [SamplingSpec(seed=i, **settings) for i in range(6)])
    own = run(logits, [SamplingSpec(seed=i, logprobs_mode="processed", **settings) for i in range(6)])
    assert raw.token_ids == own.token_ids
    for i in range(6):
        before, after = raw.logprobs[i], own.logprobs[i]
        assert (before.kept_ids, before.kept_logmass) == (after.kept_ids, after.kept_logmass)
        assert before.kept_logmass is not None and before.kept_logmass <= 0
        assert after.logprob == pytest.approx(before.logprob - before.kept_logmass, abs=1e-5)
        if truncation.get("top_k") == 1:
            assert list(after.kept_ids or ()) == [after.token_id] and after.logprob == 0


MODES: list[LogprobsMode] = ["raw", "processed", "raw_logits", "processed_logits"]


@pytest.mark.row("SAMPLE-LOGPROB-TOKEN-IDS", "values equal the matching entries of the full log-softmax for every mode")
@pytest.mark.row("X-SCORE-IDS", "equal to gather from the full log-softmax")
@given(
    VOCABS,
    st.integers(0, 10**6),
    st.lists(st.tuples(st.sampled_from(MODES), SHAPINGS, TRUNCATIONS, st.data()), min_size=1, max_size=4),
)
def test_candidates_are_gathered_from_the_full_values(vocab: int, seed: int, cases: list[Any]) -> None:
    logits = randn(len(cases), vocab, seed)
    specs = []
    for i, (mode, shaping, truncation, data) in enumerate(cases):
        ids = data.draw(st.lists(st.integers(0, vocab - 1), max_size=9))
        settings = shaping | truncation | {"logprobs": i % 3, "logprobs_mode": mode, "logprob_token_ids": tuple(ids)}
        specs.append(SamplingSpec(seed=i, **settings))
    out = run(logits, specs)
    for i, spec in enumerate(specs):
        values = (processed(spec, IDS, 2, logits[i]) if "processed" in spec.logprobs_mode else logits[i]).double()
        if spec.logprobs_mode in ("raw", "processed"):
            values = values.log_softmax(-1)
        entry = out.logprobs[i]
        assert list(entry.candidates) == pytest.approx(values[list(spec.logprob_token_ids)].tolist(), abs=2e-5)
        assert entry.logprob == pytest.approx(float(values[entry.token_id]), abs=2e-5)
        assert len(entry.top) <= i % 3


@pytest.mark.row("X-REPLAY-TF", "the forced id comes, with the value that the model and the processors give it")
@given(
    st.integers(0, 10**6), st.lists(st.tuples(st.sampled_from(MODES), SHAPINGS, TRUNCATIONS), min_size=1, max_size=5)
)
def test_forced_ids_come_with_their_own_values(seed: int, cases: list[Any]) -> None:
    """Beside rows that draw, whose tokens do not change; a forced id that truncation excludes has a processed -inf."""
    vocab = 200
    logits = randn(len(cases) + 1, vocab, seed)
    rng = np.random.default_rng(seed)
    specs = [SamplingSpec(seed=77, top_p=0.9, logprobs=0)]
    for mode, shaping, truncation in cases:
        forced = tuple(int(i) for i in rng.integers(vocab, size=4))
        specs.append(
            SamplingSpec(seed=1, logprobs=1, logprobs_mode=mode, forced_token_ids=forced, **(shaping | truncation))
        )
    out = run(logits, specs)
    assert out.token_ids[0] == run(logits[:1], specs[:1]).token_ids[0]
    for i, spec in enumerate(specs[1:], start=1):
        entry = out.logprobs[i]
        assert out.token_ids[i] == entry.token_id == spec.forced_token_ids[2]  # two ids are out already
        values = (processed(spec, IDS, 2, logits[i]) if "processed" in spec.logprobs_mode else logits[i]).double()
        assert entry.rank == 1 + int((values > values[entry.token_id]).sum())
        if spec.logprobs_mode in ("raw", "processed"):
            values = values.log_softmax(-1)
        assert entry.logprob == pytest.approx(float(values[entry.token_id]), abs=2e-5)


@given(st.integers(0, 10**6), SHAPINGS, TRUNCATIONS)
def test_behind_the_forced_ids_the_row_draws_as_any_other(seed: int, shaping: Any, truncation: Any) -> None:
    logits = randn(1, 200, seed)
    free = SamplingSpec(seed=seed, logprobs=2, return_kept_set=True, **(shaping | truncation))
    fields = {name: getattr(free, name) for name in SamplingSpec.__struct_fields__}
    forced = SamplingSpec(**fields | {"forced_token_ids": (9, 30)})
    assert run(logits, [forced]).token_ids == run(logits, [free]).token_ids
    assert run(logits, [forced]).logprobs == run(logits, [free]).logprobs


@given(st.integers(0, 10**6), st.sampled_from(MODES))
def test_a_greedy_row_keeps_its_one_token(seed: int, mode: LogprobsMode) -> None:
    logits = randn(2, 200, seed)
    spec = SamplingSpec(seed=0, temperature=0.0, top_p=0.5, logprobs=0, logprobs_mode=mode, return_kept_set=True)
    out = run(logits, [spec, spec])
    for i in range(2):
        entry = out.logprobs[i]
        assert list(entry.kept_ids or ()) == [int(logits[i].argmax())] == [out.token_ids[i]]
        assert entry.kept_logmass == pytest.approx(float(logits[i].double().log_softmax(-1).max()), abs=1e-5)
