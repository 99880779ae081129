"""Forced decoding through the real engine against transformers' teacher forcing on the same random fp32 weights, and
what trainers are told beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infer import Completion, InvalidRequestError, SamplingParams

from .engine_support import ARCHITECTURES, EOS, VOCAB, Oracle, parts_of, prompt, record, serve, write_checkpoint

TOLERANCE = 1e-4
NAMES = ["llama", "qwen3", "gemma3"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write_checkpoint(tmp_path_factory.mktemp(name), ARCHITECTURES[name]) for name in NAMES}


@pytest.fixture(scope="module")
def oracles() -> dict[str, Oracle]:
    return {name: Oracle.random(ARCHITECTURES[name]) for name in NAMES}


def check(oracle: Oracle, done: Completion, forced: list[int]) -> None:
    """The ids verbatim, and each with its teacher-forced value."""
    assert list(done.token_ids) == forced
    values = oracle.log_probs([*done.prompt_token_ids, *forced])[len(done.prompt_token_ids) - 1 : -1]
    assert done.logprobs is not None
    for entry, token_id, row in zip(done.logprobs, forced, values, strict=True):
        assert entry.token_id == token_id
        assert entry.logprob == pytest.approx(float(row[token_id]), abs=TOLERANCE)
        assert int((row > row[token_id] + TOLERANCE).sum()) < entry.rank <= int((row > row[token_id] - TOLERANCE).sum())


def force(ids: list[int], **more: Any) -> SamplingParams:
    return SamplingParams(forced_token_ids=tuple(ids), **more)


@pytest.mark.row("X-REPLAY-TF", "equal to transformers teacher forcing within 1e-4")
@pytest.mark.parametrize("name", NAMES)
def test_forced_decoding_equals_teacher_forcing(name: str, models: dict[str, Path], oracles: dict[str, Oracle]) -> None:
    """The end-of-sequence id may stand anywhere; the request's own sampling changes nothing of the model's values."""
    forced = prompt(40, seed=9)
    forced[7] = EOS
    with serve(models[name]) as engine:
        done = engine.generate(prompt(50), force(forced))
        assert (done.finish_reason, done.usage.output_tokens) == ("length", 40)
        assert done.sampling.max_tokens == 40
        check(oracles[name], done, forced)
        check(oracles[name], engine.generate(prompt(50), force(forced, top_k=1, repetition_penalty=1.7)), forced)


@pytest.mark.row("X-REPLAY-TF", "equal to teacher forcing with prefix hits")
@pytest.mark.parametrize("name", NAMES)
def test_with_a_prefix_hit(name: str, models: dict[str, Path], oracles: dict[str, Oracle]) -> None:
    """The hit reaches into the first answer: a later turn is forced behind a cached earlier one."""
    first, forced = prompt(60), prompt(30, seed=4)
    with serve(models[name]) as engine:
        answer = engine.generate(first, force(prompt(20, seed=5)))
        done = engine.generate([*first, *answer.token_ids], force(forced))
        assert done.usage.cached_tokens >= 64
        check(oracles[name], done, forced)
        again = engine.generate([*first, *answer.token_ids], force(forced))
        check(oracles[name], again, forced)


@pytest.mark.row("X-REPLAY-TF", "equal to teacher forcing with chunking")
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_with_chunks_beside_other_requests(
    name: str, depth: int, models: dict[str, Path], oracles: dict[str, Oracle]
) -> None:
    """Prompts of several steps, while others are forced and sampled in the same batch."""
    prompts = [prompt(length, seed=2) for length in (150, 40, 90)]
    forced = [prompt(25, seed=length) for length in (1, 2, 3)]
    scheduler = {"max_num_batched_tokens": 23, "in_flight_depth": depth}
    with serve(models[name], scheduler=scheduler) as engine:
        trace = record(engine)
        free = SamplingParams(seed=3, max_tokens=40, ignore_eos=True)
        done = engine.generate_many([*prompts, prompt(31)], [*(force(ids) for ids in forced), free])
        assert max(plan.num_tokens for plan in trace.plans) <= 23
        alone = engine.generate(prompt(31), free)
    for completion, ids in zip(done[:3], forced, strict=True):
        check(oracles[name], completion, ids)
    assert done[3].token_ids == alone.token_ids, "a forced neighbour does not move a draw"


@pytest.mark.row("X-REPLAY-TF", "equal to teacher forcing with preemption")
@pytest.mark.parametrize("depth", [1, 2])
def test_with_preemption(depth: int, models: dict[str, Path], oracles: dict[str, Oracle]) -> None:
    prompts = [prompt(length, seed=6) for length in (60, 50, 55)]
    forced = [prompt(40, seed=length) for length in (7, 8, 9)]
    cache = {"num_blocks": 14, "watermark": 0.0}
    with serve(models["llama"], cache=cache, scheduler={"in_flight_depth": depth}) as engine:
        done = engine.generate_many(prompts, [force(ids, return_kept_set=True, top_p=0.9) for ids in forced])
        assert engine.engine.statistics().preemptions > 0
    for completion, ids in zip(done, forced, strict=True):
        check(oracles["llama"], completion, ids)
        assert all(entry.kept_logmass is not None for entry in completion.logprobs or ())


def test_a_wrong_value_is_noticed(models: dict[str, Path], oracles: dict[str, Oracle]) -> None:
    """The comparison can fail: another model's values do not pass."""
    with serve(models["llama"]) as engine:
        done = engine.generate(prompt(50), force(prompt(10, seed=1)))
    with pytest.raises(AssertionError):
        check(oracles["qwen3"], done, prompt(10, seed=1))


@pytest.mark.row("X-REPLAY-TF", "a rollout forced again has the log-probabilities it was sampled with")
def test_a_rollout_forced_again_has_its_own_values(models: dict[str, Path]) -> None:
    params: dict[str, Any] = {"seed": 5, "top_p": 0.9, "repetition_penalty": 1.2, "logprobs_mode": "processed"}
    with serve(models["llama"]) as engine:
        rollout = engine.generate(prompt(33), SamplingParams(max_tokens=30, logprobs=2, return_kept_set=True, **params))
        forced = force(list(rollout.token_ids), logprobs=2, return_kept_set=True, **params)
        again = engine.generate(prompt(33), forced, cache_salt="computed anew")
    assert again.token_ids == rollout.token_ids and again.finish_reason == rollout.finish_reason
    assert again.stop_reason == rollout.stop_reason
    assert again.logprobs == rollout.logprobs


def test_sampling_goes_on_behind_the_forced_ids(models: dict[str, Path]) -> None:
    """An interrupted rollout is taken up again with the same tokens as if it had not been interrupted."""
    params: dict[str, Any] = {"seed": 5, "presence_penalty": 0.5, "max_tokens": 30, "ignore_eos": True}
    with serve(models["llama"]) as engine:
        whole = engine.generate(prompt(33), SamplingParams(**params))
        resumed = engine.generate(prompt(33), force(list(whole.token_ids[:12]), **params))
    assert resumed.token_ids == whole.token_ids


@pytest.mark.parametrize(
    ("settings", "reason", "stop"),
    [
        ({"stop_token_ids": (200,)}, "stop", 200),
        ({"stop_token_ids": (100,)}, "length", None),
        ({"stop_token_ids": (200,), "max_tokens": 9}, "stop", 200),
    ],
)
def test_only_the_last_id_can_end_the_answer(
    settings: dict[str, Any], reason: str, stop: int | None, models: dict[str, Path]
) -> None:
    with serve(models["llama"]) as engine:
        done = engine.generate(prompt(20), force([100, 150, 200], **settings))
    assert (done.token_ids, done.finish_reason, done.stop_reason) == ((100, 150, 200), reason, stop)


def test_a_stop_string_within_forced_text_does_not_cut_it(models: dict[str, Path]) -> None:
    with serve(models["llama"]) as engine:
        ids = engine.engine.tokenizer.encode("one fox two", add_special_tokens=False)
        done = engine.generate(prompt(20), force(ids, stop="fox"))
    assert (done.text, done.finish_reason) == ("one fox two", "length")


@pytest.mark.parametrize(
    ("values", "parameter"),
    [
        ({"forced_token_ids": ()}, "forced_token_ids"),
        ({"forced_token_ids": (1, 2), "max_tokens": 1}, "forced_token_ids"),
        ({"forced_token_ids": (1,), "n": 2}, "forced_token_ids"),
        ({"forced_token_ids": (1, VOCAB)}, "forced_token_ids"),
        ({"logprob_token_ids": (VOCAB,)}, "logprob_token_ids"),
        ({"routed_experts_prompt_start": -1}, "routed_experts_prompt_start"),
    ],
)
def test_what_cannot_be_is_refused_by_name(values: dict[str, Any], parameter: str, models: dict[str, Path]) -> None:
    with serve(models["llama"]) as engine:
        with pytest.raises(InvalidRequestError, match=parameter) as refused:
            engine.generate(prompt(20), SamplingParams(**values))
        assert refused.value.parameter == parameter
        assert parts_of(engine).scheduler.num_unfinished == 0


@pytest.mark.row("X-SCORE-IDS", "equal to gather from the full log-softmax")
@pytest.mark.row("SAMPLE-LOGPROB-TOKEN-IDS", "values equal the matching entries of the full log-softmax for every mode")
@pytest.mark.parametrize("mode", ["raw", "processed", "raw_logits", "processed_logits"])
def test_a_matrix_of_candidates_over_prompt_and_output(
    mode: Any, models: dict[str, Path], oracles: dict[str, Oracle]
) -> None:
    """One row per position, prompt and output; without processors the processed values are the model's."""
    candidates = (9, 300, 4, 9)
    params: dict[str, Any] = {"prompt_logprobs": 0, "logprob_token_ids": candidates, "logprobs_mode": mode, "seed": 1}
    with serve(models["llama"]) as engine:
        done = engine.generate(prompt(90), SamplingParams(max_tokens=20, ignore_eos=True, **params))
    logits = oracles["llama"].logits([*done.prompt_token_ids, *done.token_ids])[:-1]
    expected = (logits if mode.endswith("logits") else logits.log_softmax(-1))[:, list(candidates)]
    entries = [*(done.prompt_logprobs or ())[1:], *(done.logprobs or ())]
    assert len(entries) == len(expected) == 109
    for entry, row in zip(entries, expected, strict=True):
        assert entry is not None and entry.top == ()
        assert list(entry.candidates) == pytest.approx(row.tolist(), abs=TOLERANCE)
