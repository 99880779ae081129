"""Log-probabilities against fp64 log-softmax and counting."""

from __future__ import annotations

import math

import pytest
import torch

from infer.engine.sampling.logprobs import position_logprobs
from infer.engine.sampling.sampler import sample
from infer.engine.step import PositionLogprobs, SamplingSpec
from unit.engine.sampling.settings import oracle, row_of

VOCAB = 70
INF = math.inf


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 4


def check(entry: PositionLogprobs, values: torch.Tensor, count: int) -> None:
    """`values` [V] double are the oracle's."""
    assert entry.logprob == pytest.approx(float(values[entry.token_id]), abs=1e-4)
    assert entry.rank == 1 + int((values > values[entry.token_id]).sum())
    best = values.topk(count)
    assert [i for i, _ in entry.top] == best.indices.tolist()
    assert [v for _, v in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.row("SAMPLE-LOGPROBS", "values equal log_softmax of the logits in raw mode, and the logits in the others")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("mode", ["raw", "processed", "raw_logits", "processed_logits"])
def test_sampled_tokens_carry_the_values_of_their_mode(mode: str, temperature: float) -> None:
    logits = randn(9, VOCAB)
    spec = SamplingSpec(
        seed=5, temperature=temperature, repetition_penalty=1.4, presence_penalty=0.3, logit_bias=((3, 2.0),),
        logprobs=6, logprobs_mode=mode,  # type: ignore[arg-type]
    )  # fmt: skip
    ids = [3, 9, 22, 40]
    out = sample(logits, [row_of(spec, ids, 2, VOCAB) for _ in range(9)])
    for i in range(9):
        values = logits[i].double()
        if mode == "raw":
            values = torch.log_softmax(values, dim=-1)
        if mode.startswith("processed"):
            values = oracle(spec, ids, 2, logits[i]).double()
        if mode == "processed":
            values = torch.log_softmax(values, dim=-1)
        assert out.logprobs[i].token_id == out.token_ids[i]
        check(out.logprobs[i], values, 6)


def test_rows_of_one_batch_may_differ_in_everything() -> None:
    logits = randn(6, VOCAB, seed=1)
    specs = [
        SamplingSpec(seed=1, logprobs=0),
        SamplingSpec(seed=2, temperature=0.0),
        SamplingSpec(seed=3, temperature=0.0, logprobs=VOCAB + 5),
        SamplingSpec(seed=4, logprobs=1, logprobs_mode="raw_logits"),
        SamplingSpec(seed=5, top_k=3, logprobs=9, logprobs_mode="processed_logits"),
        SamplingSpec(seed=6, temperature=0.0, logprobs=2, logprobs_mode="processed_logits"),
    ]
    out = sample(logits, [row_of(spec, [0], 1, VOCAB) for spec in specs])
    assert sorted(out.logprobs) == [0, 2, 3, 4, 5]
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    check(out.logprobs[0], logprobs[0], 0)
    check(out.logprobs[2], logprobs[2], VOCAB)
    check(out.logprobs[3], logits[3].double(), 1)
    assert len(out.logprobs[4].top) == 3, "alternatives that cannot be sampled are left out"
    check(out.logprobs[5], logits[5].double(), 2)


def test_equal_logits_share_a_rank_and_are_listed_by_id() -> None:
    logits = torch.zeros(1, 300)
    logits[0, [250, 30, 100]] = 1.0
    logits[0, 200] = 2.0
    entry = position_logprobs(logits, [100], [3], normalise=False)[0]
    assert (entry.rank, entry.top) == (2, ((200, 2.0), (30, 1.0), (100, 1.0)))
    lowest = position_logprobs(logits, [299], [6], normalise=False)[0]
    assert (lowest.rank, [i for i, _ in lowest.top]) == (5, [200, 30, 100, 250, 0, 1])


def test_a_greedy_token_has_rank_one_and_leads_its_alternatives() -> None:
    logits = randn(20, VOCAB).round()  # many ties
    spec = SamplingSpec(seed=0, temperature=0.0, logprobs=3)
    out = sample(logits, [row_of(spec, [0], 1, VOCAB)] * 20)
    assert all(entry.rank == 1 and entry.top[0][0] == entry.token_id for entry in out.logprobs.values())


def test_masked_model_logits_have_no_place_among_the_alternatives() -> None:
    logits = torch.tensor([[0.0, -INF, 1.0]])
    entry = position_logprobs(logits, [0], [3], normalise=True)[0]
    assert [i for i, _ in entry.top] == [2, 0]
