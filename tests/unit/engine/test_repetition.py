"""Requests that end because they loop: behaviour case 15, streams, several choices, preemption, the wire, bad values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from api_server import in_process
from infer import InvalidRequestError, RepetitionDetection, SamplingParams
from infer.engine.repetition import RepetitionDetector
from infer.engine.step import SamplingSpec
from infer.testing.fake_engine import fake_engine
from served import Script, letters_engine, settings
from step_driver import EOS, StepDriver, cache_config, full_group, output

ROOT = Path(__file__).parents[3]
TWO_TO_FIVE = RepetitionDetection(min_pattern_size=2, max_pattern_size=5, min_count=3)
LOOP = "One two. " + "ha ho " * 20
ENDS_AT = len("One two. ha ho ha ho ha ho")
"""The third " ha ho"; it begins with the space in front of the first."""
SIX = RepetitionDetection(max_pattern_size=6, min_count=3)


def ended(tokens: Sequence[int], **options: Any) -> tuple[list[int], str | None]:
    driver = StepDriver()
    request = driver.add(range(20), rule=TWO_TO_FIVE, **options)
    driver.schedule()
    driver.apply({request: list(tokens)})
    return output(request), request.finish_reason


@pytest.mark.row("SAMPLE-REPETITION", "with a pattern size and count set, a loop stops with its own finish reason")
def test_case_15_three_times_is_a_loop_and_two_times_is_not() -> None:
    assert ended([10, 20] * 3 + [30]) == ([10, 20] * 3, "repetition")
    assert ended([10, 20] * 2 + [30]) == ([10, 20] * 2 + [30], None)


def test_case_15_pieces_shorter_or_longer_than_asked_are_no_reason() -> None:
    assert ended([10] * 5) == ([10] * 5, None), "five equal tokens are not three pieces of two"
    assert ended([10] * 7) == ([10] * 6, "repetition"), "six are"
    assert ended([1, 2, 3, 4, 5, 6] * 2 + [1, 2]) == ([1, 2, 3, 4, 5, 6] * 2 + [1, 2], None)


def test_case_15_min_tokens_suppresses_it_for_so_long() -> None:
    assert ended([10, 20] * 3, min_tokens=10) == ([10, 20] * 3, None)
    assert ended([10, 20] * 6, min_tokens=10) == ([10, 20] * 5, "repetition")


def test_case_15_a_stop_id_on_the_same_token_wins() -> None:
    assert ended([10, 20] * 3, stop_ids={EOS: None}) == ([10, 20] * 3, "repetition")
    tokens, reason = ended([10, 20, 10, 20, 10, 20], stop_ids={20: 20})
    assert (tokens, reason) == ([10, 20], "stop")
    assert ended([10, 7, 7, 7, 7, 7, 7], stop_ids={7: 7}, forced_token_ids=(10, 7, 7, 7, 7, 7, 7)) == (
        [10, 7, 7, 7, 7, 7, 7],
        "stop",
    )


def test_the_last_allowed_token_that_completes_a_loop_says_so() -> None:
    assert ended([10, 20] * 3, max_tokens=6) == ([10, 20] * 3, "repetition")
    assert ended([10, 20] * 3, max_tokens=5) == ([10, 20, 10, 20, 10], "length")


def test_what_the_prompt_repeats_is_no_reason() -> None:
    driver = StepDriver(next_token=lambda token_ids, sampling: 10 if len(token_ids) % 2 == 0 else 20)
    request = driver.add([10, 20] * 10, 5, rule=TWO_TO_FIVE)
    driver.run()
    assert (len(output(request)), request.finish_reason) == (5, "length")


@pytest.mark.row("SAMPLE-REPETITION", "a scripted loop stops on exactly the predicted token, preempted or not")
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_preempted_request_remembers_what_it_said(depth: int) -> None:
    """A pool too small for all: requests are thrown back in the middle of their loops."""
    driver = StepDriver(cache_config(full_group(12)), next_token=lambda token_ids, sampling: 100 + len(token_ids) % 7)
    rule = RepetitionDetection(max_pattern_size=8, min_count=6)
    requests = [driver.add(range(index, index + 30), 60, rule=rule) for index in range(4)]
    driver.run(depth)
    assert driver.scheduler.stats.preemptions > 0
    assert [(len(output(request)), request.finish_reason) for request in requests] == [(42, "repetition")] * 4
    driver.assert_nothing_left()


@pytest.mark.anyio
@pytest.mark.row("SAMPLE-REPETITION", "streamed and not, at every depth, and for each of several choices by itself")
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("interval", [1, 7])
async def test_a_stream_ends_with_the_token_that_completes_the_loop(depth: int, interval: int) -> None:
    async with fake_engine(Script(LOOP), settings(in_flight_depth=depth, stream_interval=interval)) as engine:
        params = SamplingParams(max_tokens=100, repetition_detection=SIX)
        deltas = []
        async with engine.stream("prompt", params) as stream:
            async for delta in stream:
                deltas.append(delta)
        assert "".join(delta.text for delta in deltas) == LOOP[:ENDS_AT]
        assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["repetition"]
        done = await engine.generate("prompt", params)
        assert (done.text, done.finish_reason, done.stop_reason) == (LOOP[:ENDS_AT], "repetition", None)
        assert done.text == stream.result.text and len(done.token_ids) == ENDS_AT


def one_loops(token_ids: Sequence[int], sampling: SamplingSpec) -> int:
    """The choice with seed 11 says "ab" for ever, the others count up."""
    return ord("ab"[len(token_ids) % 2]) if sampling.seed == 11 else 32 + len(token_ids) % 95


@pytest.mark.anyio
@pytest.mark.row("SAMPLE-REPETITION", "for each of several choices by itself")
async def test_only_the_choice_that_loops_ends() -> None:
    async with fake_engine(one_loops) as engine:
        params = SamplingParams(max_tokens=40, seed=10, n=3, repetition_detection=SIX)
        done = await engine.generate("prompt", params)
    assert [(len(c.token_ids), c.finish_reason) for c in done.choices] == [
        (40, "length"),
        (6, "repetition"),
        (40, "length"),
    ]


@pytest.mark.anyio
async def test_a_stop_string_on_the_same_token_wins() -> None:
    async with fake_engine(Script(LOOP)) as engine:
        params = SamplingParams(max_tokens=100, repetition_detection=SIX, stop=[" ha ho ha ho ha ho"])
        done = await engine.generate("prompt", params)
    assert (done.text, done.finish_reason, done.stop_reason) == ("One two.", "stop", " ha ho ha ho ha ho")


@pytest.mark.row("SAMPLE-REPETITION", "normal text never triggers it")
@pytest.mark.parametrize("unit", ["words", "bytes"])
def test_prose_is_no_loop(unit: str) -> None:
    """The pages of this project without their tables and code, as words and as bytes."""
    text = ""
    for page in sorted((ROOT / "docs").glob("*.md")):
        blocks = page.read_text("utf-8").split("```")[::2]
        text += "\n".join(line for line in "".join(blocks).splitlines() if not line.startswith(("|", " ", "#")))
    words = text.split()  # taking lines out leaves empty ones behind, many in a row
    ids = [hash(word) for word in words] if unit == "words" else list(" ".join(words).encode())
    assert len(ids) > 5000
    detector = RepetitionDetector(RepetitionDetection(max_pattern_size=200, min_count=4))
    assert [index for index, token in enumerate(ids) if detector.feed(token)] == []
    assert any(detector.feed(token) for token in ids[:200] * 4), "the same text four times over is one"


@pytest.mark.anyio
async def test_other_requests_are_not_touched() -> None:
    async with letters_engine() as engine:
        asked = SamplingParams(max_tokens=200, seed=3)
        plain = await engine.generate("abc", asked)
        watched = await engine.generate("abc", SamplingParams(max_tokens=200, seed=3, repetition_detection=SIX))
    assert (plain.token_ids, plain.finish_reason) == (watched.token_ids, watched.finish_reason)


@pytest.mark.anyio
@pytest.mark.row("SAMPLE-REPETITION", "over HTTP under vLLM's name, in every shape of the API, streamed too")
async def test_over_http() -> None:
    rule = {"max_pattern_size": 6, "min_count": 3}
    async with in_process(Script(LOOP)) as (client, _):
        base = {"max_tokens": 100, "repetition_detection": rule}
        chat = await client.post("/v1/chat/completions", json={**base, "messages": [{"role": "user", "content": "hi"}]})
    async with in_process(Script(LOOP)) as (client, _):
        text = await client.post("/v1/completions", json={**base, "prompt": "hi"})
        streamed = await client.post("/v1/completions", json={**base, "prompt": "hi", "stream": True})
        ids = await client.post("/inference/v1/generate", json={"token_ids": [104, 105], "sampling_params": base})
    choice = chat.json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (LOOP[:ENDS_AT], "repetition")
    choice = text.json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (LOOP[:ENDS_AT], "repetition")
    assert '"finish_reason":"repetition"' in streamed.text.replace(" ", "")
    choice = ids.json()["choices"][0]
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (ENDS_AT, "repetition")


BAD: list[tuple[Any, str]] = [
    ({"min_count": 3}, "max_pattern_size"),
    ({"max_pattern_size": 3}, "min_count"),
    ({"max_pattern_size": 3, "min_count": 1}, "min_count=1"),
    ({"max_pattern_size": 0, "min_count": 2}, "max_pattern_size=0"),
    ({"max_pattern_size": 5000, "min_count": 2}, "4096"),
    ({"max_pattern_size": 3, "min_pattern_size": 4, "min_count": 2}, "min_pattern_size=4 is larger"),
    ({"max_pattern_size": 3, "min_count": 2, "window": 8}, "window"),
    (5, "repetition_detection"),
]


@pytest.mark.anyio
@pytest.mark.parametrize(("value", "words"), BAD)
async def test_a_bad_rule_is_refused_by_name(value: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as refused:
        SamplingParams(repetition_detection=value)
    assert refused.value.parameter == "repetition_detection"
    async with in_process() as (client, _):
        reply = await client.post("/v1/completions", json={"prompt": "a", "repetition_detection": value})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "repetition_detection")
