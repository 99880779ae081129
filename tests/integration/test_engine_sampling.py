"""Sampling through the real engine: seeds, choices, filters, stop strings, streams, and the checkpoint's defaults.
Random tiny Llama in fp32 with a byte-level tokenizer, so that every id is text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from infer import Completion, SamplingParams
from infer.engine.blocking import BlockingEngine

from .engine_support import (
    ARCHITECTURES,
    EOS,
    VOCAB,
    Oracle,
    assert_nothing_held,
    greedy,
    ids,
    prompt,
    record,
    same_tokens,
    serve,
    write_checkpoint,
)

PROMPT = prompt(50)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), ARCHITECTURES["llama"])


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[BlockingEngine]:
    with serve(model) as engine:
        yield engine


def sampled(max_tokens: int = 24, **more: object) -> SamplingParams:
    return SamplingParams(**({"seed": 7, "max_tokens": max_tokens, "ignore_eos": True} | more))


# -- choices -----------------------------------------------------------------------------------------------------------


@pytest.mark.row("SAMPLE-N", "n=4 with seed s equals four requests with seeds s..s+3")
@pytest.mark.row("SAMPLE-N", "prompt tokens are computed once, and choices are indexed")
@pytest.mark.parametrize("length", [50, 48, 200])
def test_four_choices_are_four_requests(model: Path, length: int) -> None:
    """Also for a prompt of whole blocks, and for one of several chunks: counted in the plans, without a prefix cache."""
    token_ids = prompt(length)
    with serve(model, cache={"prefix_caching": False}) as engine:
        trace = record(engine)
        done = engine.generate(token_ids, sampled(20, n=4, logprobs=1))
        assert trace.num_tokens == length + 4 * 19
        assert_nothing_held(engine)
        alone = [engine.generate(token_ids, sampled(20, seed=7 + i, logprobs=1)) for i in range(4)]
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    assert [choice.seed for choice in done.choices] == [7, 8, 9, 10]
    assert [choice.token_ids for choice in done.choices] == ids(alone)
    assert [choice.text for choice in done.choices] == [completion.text for completion in alone]
    for choice, completion in zip(done.choices, alone, strict=True):
        mine, other = choice.logprobs or (), completion.logprobs or ()
        assert [e.logprob for e in mine] == pytest.approx([e.logprob for e in other], abs=1e-5)
    assert len(set(ids(alone))) == 4
    assert (done.usage.prompt_tokens, done.usage.output_tokens) == (length, 80)


@pytest.mark.row("SAMPLE-N", "greedy with n above 1 has one documented, tested answer: equal choices")
def test_greedy_choices_are_equal(engine: BlockingEngine) -> None:
    done = engine.generate(PROMPT, greedy(16, n=3))
    assert len({choice.token_ids for choice in done.choices}) == 1 and len(done.choices) == 3
    assert done.token_ids == engine.generate(PROMPT, greedy(16)).token_ids


@pytest.mark.row("SAMPLE-N", "prompt tokens are computed once, and choices are indexed")
def test_choices_that_find_no_room_come_later(model: Path) -> None:
    """Slots or blocks for two of four: the others wait, and answer the same."""
    with serve(model) as engine:
        expected = engine.generate(PROMPT, sampled(20, n=4)).choices
    for sections in ({"scheduler": {"max_num_seqs": 4, "max_num_active_seqs": 2}}, {"cache": {"num_blocks": 10}}):
        with serve(model, **sections) as engine:
            got = engine.generate(PROMPT, sampled(20, n=4)).choices
            assert_nothing_held(engine)
        assert [choice.token_ids for choice in got] == [choice.token_ids for choice in expected]


# -- filters -----------------------------------------------------------------------------------------------------------


@pytest.mark.row("SAMPLE-LOGIT-FILTERS", "a bias of 100 always yields that token")
def test_a_bias_of_100_always_wins(engine: BlockingEngine) -> None:
    for token_id in (3, 77, VOCAB - 1):
        for temperature in (0.0, 1.0, 2.0):
            params = sampled(20, temperature=temperature, logit_bias={token_id: 100.0})
            assert set(engine.generate(PROMPT, params).token_ids) == {token_id}


@pytest.mark.row("SAMPLE-LOGIT-FILTERS", "an allow-list is never left in 1,000 draws")
def test_an_allow_list_is_never_left(engine: BlockingEngine) -> None:
    allowed = (5, 90, 91, 200, 319)
    params = [sampled(200, temperature=5.0, seed=s, allowed_token_ids=allowed) for s in range(5)]
    drawn = [t for done in engine.generate_many([PROMPT] * 5, params) for t in done.token_ids]
    assert len(drawn) == 1000 and set(drawn) == set(allowed)


@pytest.mark.row("SAMPLE-LOGIT-FILTERS", "a multi-token bad word never appears though its pieces may")
def test_a_bad_word_never_appears(engine: BlockingEngine) -> None:
    tokenizer = engine.engine.tokenizer
    q, z = (tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "qz")
    assert tokenizer.encode("qz", add_special_tokens=False) == [q, z]
    free = sampled(100, temperature=5.0, allowed_token_ids=(q, z))
    assert "qz" in engine.generate(PROMPT, free).text
    texts = [
        engine.generate(PROMPT, sampled(100, temperature=5.0, allowed_token_ids=(q, z), bad_words=("qz",), seed=s)).text
        for s in range(5)
    ]
    assert not any("qz" in text for text in texts)
    assert all("q" in text or "z" in text for text in texts) and any("z" in text for text in texts)
    assert any("q" in text for text in texts)


# -- seeds -------------------------------------------------------------------------------------------------------------


@pytest.mark.row("SAMPLE-CORE", "a seed repeats across batch composition and restart")
@pytest.mark.parametrize("extra", [{}, {"top_k": 20, "top_p": 0.9, "frequency_penalty": 0.5}])
def test_a_seed_repeats(model: Path, engine: BlockingEngine, extra: dict[str, float]) -> None:
    params = sampled(24, **extra)
    alone = engine.generate(PROMPT, params)
    others = [sampled(30, seed=100 + i, temperature=2.0) for i in range(6)]
    crowd = engine.generate_many(
        [*(prompt(20 + i) for i in range(6)), PROMPT, PROMPT], [*others, params, sampled(24, **(extra | {"seed": 8}))]
    )
    with serve(model, scheduler={"max_num_batched_tokens": 33}) as another:
        restarted = another.generate(PROMPT, params)
    assert alone.token_ids == crowd[6].token_ids == restarted.token_ids
    assert crowd[7].token_ids != alone.token_ids


def test_a_drawn_seed_is_returned_and_repeats(engine: BlockingEngine) -> None:
    first, second = (engine.generate(PROMPT, SamplingParams(max_tokens=12, ignore_eos=True)) for _ in range(2))
    assert first.seed != second.seed and first.sampling.seed == first.seed
    assert first.token_ids != second.token_ids
    again = engine.generate(PROMPT, SamplingParams(max_tokens=12, ignore_eos=True, seed=first.seed))
    assert again.token_ids == first.token_ids


# -- stops and kinds of output -----------------------------------------------------------------------------------------


def letters(engine: BlockingEngine, word: str) -> dict[str, object]:
    """Sampling that writes only the letters of `word`, one token each."""
    tokenizer = engine.engine.tokenizer
    return {"allowed_token_ids": tuple(tokenizer.encode(c, add_special_tokens=False)[0] for c in word)}


def cut(text: str, stop: str, include: bool) -> str:
    return text[: text.index(stop) + (len(stop) if include else 0)]


@pytest.mark.row("SAMPLE-CORE", "stop strings cut exactly in streams and not")
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_stop_strings_cut_exactly(model: Path, include: bool, depth: int) -> None:
    """A stop of three tokens that begins many times before it is complete: nothing of it leaks into a stream."""
    with serve(model, scheduler={"in_flight_depth": depth}) as engine:
        base = {"temperature": 5.0, **letters(engine, "qz")}
        for seed in range(3):
            free = engine.generate(PROMPT, sampled(80, seed=seed, **base))
            params = sampled(80, seed=seed, stop=("zqz", "never"), include_stop=include, logprobs=0, **base)
            done = engine.generate(PROMPT, params)
            assert done.text == cut(free.text, "zqz", include)
            assert (done.finish_reason, done.stop_reason) == ("stop", "zqz")
            assert len(done.logprobs or ()) == len(done.token_ids) == free.text.index("zqz") + 3
            deltas = list(engine.stream(PROMPT, params))
            assert "".join(delta.text for delta in deltas) == done.text
            assert tuple(t for delta in deltas for t in delta.token_ids) == done.token_ids
            assert [d.finish_reason for d in deltas] == [None] * (len(deltas) - 1) + ["stop"]
            seen = ""
            for delta in deltas[:-1]:
                seen += delta.text
                assert done.text.startswith(seen)
        assert_nothing_held_soon(engine)


def assert_nothing_held_soon(engine: BlockingEngine) -> None:
    """What a stop string ended may still be in its last step; the next request sees it gone."""
    engine.generate(PROMPT, greedy(2))
    assert_nothing_held(engine)


@pytest.mark.row("SAMPLE-CORE", "delta, cumulative and final-only outputs agree")
@pytest.mark.parametrize("interval", [1, 4, 1000])
def test_every_kind_of_output_says_the_same(model: Path, interval: int) -> None:
    cases = [greedy(30), sampled(31, temperature=3.0, logprobs=1), sampled(40, stop="e"), sampled(25, n=3)]
    with serve(model, scheduler={"stream_interval": interval}) as engine:
        for params in cases:
            final = engine.generate(PROMPT, params)
            text, token_ids = {c.index: "" for c in final.choices}, {c.index: () for c in final.choices}
            ended = {}
            deltas = list(engine.stream(PROMPT, params))
            for delta in deltas:
                cumulative = text[delta.choice_index] + delta.text
                assert final.choices[delta.choice_index].text.startswith(cumulative)
                text[delta.choice_index] = cumulative
                token_ids[delta.choice_index] += delta.token_ids
                assert delta.choice_index not in ended
                if delta.finish_reason is not None:
                    ended[delta.choice_index] = (delta.finish_reason, delta.stop_reason)
            for choice in final.choices:
                assert text[choice.index] == choice.text and token_ids[choice.index] == choice.token_ids
                assert ended[choice.index] == (choice.finish_reason, choice.stop_reason)
            if interval == 1000:
                assert len(deltas) == len(final.choices)


def test_the_result_of_a_stream_is_the_completion(engine: BlockingEngine) -> None:
    async def both() -> tuple[Completion, Completion]:
        inner = engine.engine
        async with inner.stream(PROMPT, sampled(12, logprobs=1)) as stream:
            async for _ in stream:
                pass
        return stream.result, await inner.generate(PROMPT, sampled(12, logprobs=1))

    streamed, whole = engine._portal.call(both)
    assert streamed.choices[0].token_ids == whole.choices[0].token_ids
    assert (streamed.text, streamed.sampling, streamed.finish_reason) == (whole.text, whole.sampling, "length")


def test_end_of_sequence(engine: BlockingEngine) -> None:
    """EOS ends the answer, stays among the ids, and is not text; ignore_eos and min_tokens hold it off."""
    ends = {"logit_bias": {EOS: 100.0}, "temperature": 0, "ignore_eos": False}
    done = engine.generate(PROMPT, sampled(9, **ends))
    assert (done.token_ids, done.text, done.finish_reason, done.stop_reason) == ((EOS,), "", "stop", None)
    late = engine.generate(PROMPT, sampled(9, **ends, min_tokens=4))
    assert late.token_ids[-1] == EOS and len(late.token_ids) == 5 and EOS not in late.token_ids[:-1]
    on = engine.generate(PROMPT, sampled(9, **(ends | {"ignore_eos": True})))
    assert on.token_ids == (EOS,) * 9 and on.finish_reason == "length"
    stop = engine.generate(PROMPT, sampled(9, logit_bias={100: 100.0}, stop_token_ids=(100,)))
    assert (stop.token_ids, stop.finish_reason, stop.stop_reason) == ((100,), "stop", 100)


# -- the checkpoint's defaults -----------------------------------------------------------------------------------------


@pytest.mark.row("SAMPLE-CORE", "generation_config.json's defaults are used where the caller is silent, and reported")
def test_generation_config_speaks_where_the_caller_is_silent(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(model, path)
    defaults = {"temperature": 0.7, "top_k": 11, "top_p": 0.8, "repetition_penalty": 1.2}
    settings = defaults | {"do_sample": True, "eos_token_id": [EOS, 50]}
    (path / "generation_config.json").write_text(json.dumps(settings))
    with serve(path) as engine:
        silent = engine.generate(PROMPT, SamplingParams(seed=3, max_tokens=16))
        assert silent.sampling_defaults == defaults
        assert {name: getattr(silent.sampling, name) for name in defaults} == defaults
        spoken = engine.generate(PROMPT, SamplingParams(seed=3, max_tokens=16, **defaults))
        assert spoken.sampling_defaults == {} and spoken.token_ids == silent.token_ids
        partly = engine.generate(PROMPT, SamplingParams(seed=3, max_tokens=16, top_k=0, temperature=1.0))
        assert partly.sampling_defaults == {"top_p": 0.8, "repetition_penalty": 1.2}
        assert (partly.sampling.top_k, partly.sampling.temperature) == (0, 1.0)
        assert engine.generate(PROMPT).sampling_defaults == defaults
        ended = engine.generate(PROMPT, greedy(9, ignore_eos=False, logit_bias={50: 100.0}))
        assert (ended.token_ids, ended.finish_reason) == ((50,), "stop")
    with serve(path, model={"use_generation_config": False}) as engine:
        plain = engine.generate(PROMPT, SamplingParams(seed=3, max_tokens=16))
        assert plain.sampling_defaults == {} and plain.sampling.top_k == 0


def test_greedy_choices_answer_as_transformers(engine: BlockingEngine) -> None:
    expected = Oracle.random(ARCHITECTURES["llama"]).greedy(PROMPT, 20)
    for choice in engine.generate(PROMPT, greedy(20, n=4)).choices:
        same_tokens(choice.token_ids, expected)
