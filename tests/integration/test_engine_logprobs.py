"""Log-probabilities of output and prompt through the real engine, against transformers on the same weights.
Random tiny Llama in fp32; the prompts are longer than a step's budget where a test says so."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from infer import Completion, SamplingParams, TokenLogprob

from .engine_support import (
    ARCHITECTURES,
    VOCAB,
    Oracle,
    greedy,
    prompt,
    record,
    serve,
    write_checkpoint,
)

TOLERANCE = 1e-4
PROMPT = prompt(70)
SAMPLED = {"seed": 11, "max_tokens": 24, "ignore_eos": True, "temperature": 0.8}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), ARCHITECTURES["llama"])


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle.random(ARCHITECTURES["llama"])


def before_each(oracle: Oracle, done: Completion) -> Tensor:
    """[outputs, vocabulary] logits that predicted each output token, teacher-forced."""
    ids = [*done.prompt_token_ids, *done.token_ids]
    return oracle.logits(ids)[len(done.prompt_token_ids) - 1 : -1]


def check(entries: Sequence[TokenLogprob], token_ids: Sequence[int], expected: Tensor, top: int) -> None:
    """Chosen value, rank and alternatives, best first, against a row of values per token."""
    assert [entry.token_id for entry in entries] == list(token_ids)
    assert len(entries) == len(expected)
    for entry, values in zip(entries, expected, strict=True):
        assert entry.logprob == pytest.approx(float(values[entry.token_id]), abs=TOLERANCE)
        above, near = values > values[entry.token_id] + TOLERANCE, values > values[entry.token_id] - TOLERANCE
        assert int(above.sum()) < entry.rank <= int(near.sum())
        assert len(entry.top) == top
        best = values.topk(top).values.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best, abs=TOLERANCE)
        for token_id, value in entry.top:
            assert value == pytest.approx(float(values[token_id]), abs=TOLERANCE)


@pytest.mark.row("SAMPLE-LOGPROBS", "values equal log_softmax of transformers logits within 1e-4, raw and processed")
def test_raw_is_the_model_alone(model: Path, oracle: Oracle) -> None:
    """Whatever the processors do to the choice, raw values are the model's at temperature 1."""
    with serve(model) as engine:
        for more in ({}, {"top_k": 5, "repetition_penalty": 1.5, "logit_bias": {9: 5.0}}):
            done = engine.generate(PROMPT, SamplingParams(**(SAMPLED | more), logprobs=4))
            check(done.logprobs or (), done.token_ids, before_each(oracle, done).log_softmax(-1), 4)
        done = engine.generate(PROMPT, SamplingParams(**SAMPLED, logprobs=0))
        check(done.logprobs or (), done.token_ids, before_each(oracle, done).log_softmax(-1), 0)
        assert engine.generate(PROMPT, SamplingParams(**SAMPLED)).logprobs is None


@pytest.mark.row("SAMPLE-LOGPROBS", "values equal log_softmax of transformers logits within 1e-4, raw and processed")
def test_raw_logits_are_unnormalised(model: Path, oracle: Oracle) -> None:
    with serve(model) as engine:
        done = engine.generate(PROMPT, SamplingParams(**SAMPLED, logprobs=3, logprobs_mode="raw_logits", top_k=7))
    check(done.logprobs or (), done.token_ids, before_each(oracle, done), 3)


@pytest.mark.row("SAMPLE-LOGPROBS", "values equal log_softmax of transformers logits within 1e-4, raw and processed")
def test_processed_values_are_what_was_drawn_from(model: Path, oracle: Oracle) -> None:
    """All processed values of each step, normalised, equal the log_softmax of transformers' processor chain."""
    settings: dict[str, Any] = {"repetition_penalty": 1.4, "top_k": 30, "top_p": 0.9, "min_p": 0.02}
    params = SamplingParams(**(SAMPLED | settings), logprobs=VOCAB, logprobs_mode="processed_logits")
    with serve(model) as engine:
        done = engine.generate(PROMPT, params)
    chain = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.4),
            TemperatureLogitsWarper(0.8),
            TopKLogitsWarper(30),
            TopPLogitsWarper(0.9),
            MinPLogitsWarper(0.02),
        ]
    )
    kept = 0
    for index, (entry, row) in enumerate(zip(done.logprobs or (), before_each(oracle, done), strict=True)):
        context = torch.tensor([[*done.prompt_token_ids, *done.token_ids[:index]]])
        expected = chain(context, row[None])[0].log_softmax(-1)
        values = torch.full((VOCAB,), -torch.inf)
        for token_id, value in entry.top:
            values[token_id] = value
        torch.testing.assert_close(values.log_softmax(-1), expected, rtol=0, atol=TOLERANCE)
        kept += int(expected.isfinite().sum())
    assert 24 < kept < 24 * 30


@pytest.mark.row("SAMPLE-LOGPROBS", "streamed pieces join to the non-streamed answer")
def test_streamed_values_join_to_the_whole(model: Path) -> None:
    params = SamplingParams(**SAMPLED, logprobs=2, n=2)
    with serve(model) as engine:
        whole = engine.generate(PROMPT, params)
        pieces: dict[int, list[TokenLogprob]] = {0: [], 1: []}
        for delta in engine.stream(PROMPT, params):
            assert len(delta.logprobs or ()) == len(delta.token_ids)
            pieces[delta.choice_index] += delta.logprobs or ()
    for choice in whole.choices:
        assert [e.token_id for e in pieces[choice.index]] == [e.token_id for e in choice.logprobs or ()]
        expected = [e.logprob for e in choice.logprobs or ()]
        assert [e.logprob for e in pieces[choice.index]] == pytest.approx(expected, abs=1e-5)


@pytest.mark.row("SAMPLE-PROMPT-LOGPROBS", "equal to transformers teacher forcing within 1e-4, with and without chunks")
@pytest.mark.row("SAMPLE-PROMPT-LOGPROBS", "after a prefix fill: recomputed, never stale")
@pytest.mark.parametrize("budget", [512, 37])
@pytest.mark.parametrize("depth", [1, 2])
def test_prompt_logprobs(model: Path, oracle: Oracle, budget: int, depth: int) -> None:
    """Beside another request; alone; and again when the whole prompt is in the cache, which it may fill but not read."""
    ids = prompt(150, seed=2)
    expected = oracle.log_probs(ids)[:-1]
    scheduler = {"max_num_batched_tokens": budget, "in_flight_depth": depth}
    with serve(model, scheduler=scheduler) as engine:
        trace = record(engine)
        both = engine.generate_many([prompt(40), ids], [greedy(8), greedy(4, prompt_logprobs=3, logprobs=1)])
        again = engine.generate(ids, greedy(4, prompt_logprobs=3, logprobs_mode="raw"))
        filled = engine.generate(ids, greedy(4))
        logits = engine.generate(ids, greedy(4, prompt_logprobs=0, logprobs_mode="raw_logits"))
        assert max(plan.num_tokens for plan in trace.plans) <= budget
    for done in (both[1], again):
        assert done.prompt_logprobs is not None and done.prompt_logprobs[0] is None
        check([e for e in done.prompt_logprobs if e is not None], ids[1:], expected, 3)
        assert done.usage.cached_tokens == 0
    assert filled.usage.cached_tokens == 144 and filled.prompt_logprobs is None
    check([e for e in logits.prompt_logprobs or () if e is not None], ids[1:], oracle.logits(ids)[:-1], 0)
    assert both[1].token_ids == again.token_ids == filled.token_ids


@pytest.mark.row("SAMPLE-PROMPT-LOGPROBS", "recomputed after preemption, each position once")
def test_prompt_logprobs_survive_preemption(model: Path, oracle: Oracle) -> None:
    prompts = [prompt(length, seed=6) for length in (60, 50, 55)]
    with serve(model, cache={"num_blocks": 14, "watermark": 0.0}) as engine:
        done = engine.generate_many(prompts, greedy(40, prompt_logprobs=1))
        assert engine.engine.statistics().preemptions > 0
    for ids, completion in zip(prompts, done, strict=True):
        entries = [e for e in completion.prompt_logprobs or () if e is not None]
        check(entries, ids[1:], oracle.log_probs(ids)[:-1], 1)


def test_a_stale_or_shifted_value_is_noticed(model: Path, oracle: Oracle) -> None:
    """The comparison can fail: values of the neighbouring position do not pass."""
    with serve(model) as engine:
        done = engine.generate(PROMPT, greedy(2, prompt_logprobs=1))
    entries = [e for e in done.prompt_logprobs or () if e is not None]
    with pytest.raises(AssertionError):
        check(entries, PROMPT[1:], oracle.log_probs(PROMPT)[1:], 1)


MEMORY = """
import json, resource, sys
from engine_support import greedy, prompt, serve
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
with serve(sys.argv[1], scheduler={"max_num_batched_tokens": 1024}) as engine:
    engine.generate(prompt(1000, seed=1), greedy(2))
    before = peak()
    done = engine.generate(prompt(1000), greedy(2, prompt_logprobs=2))
    print(json.dumps([peak() - before, len(done.prompt_logprobs)]))
"""


@pytest.mark.platform("cpu", "it starts a program of its own, which gets the default platform")
@pytest.mark.row("SAMPLE-PROMPT-LOGPROBS", "extra memory bounded by chunk x vocabulary")
def test_memory_does_not_grow_with_the_prompt(tmp_path: Path) -> None:
    """1,000 positions of a vocabulary of 60,000 are 240 MB of fp32 logits; a fixed number of rows is made at a time."""
    config = ARCHITECTURES["llama"] | {"vocab_size": 60_000, "max_position_embeddings": 2048, "hidden_size": 32}
    path = write_checkpoint(tmp_path, config)
    command = [sys.executable, "-c", MEMORY, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent, env=None)
    rise, entries = json.loads(done.stdout.splitlines()[-1])
    assert entries == 1000
    assert rise < 100e6
