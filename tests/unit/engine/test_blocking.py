"""The blocking facade: the same engine from threads without an event loop, and what it says when it is not open."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from infer import Delta, InvalidRequestError, SamplingParams
from infer.artifacts import ArtifactRequest, SinkTarget
from infer.engine.blocking import BlockingEngine
from infer.errors import EngineClosedError, EngineDeadError, EngineError
from served import answer_text, letters_engine

SIX = SamplingParams(max_tokens=6, seed=2)


def blocking() -> BlockingEngine:
    return BlockingEngine(letters_engine)


@pytest.mark.row("SERVE-CPP-API", "the blocking facade is the same engine behind anyio's portal")
def test_it_answers_like_the_engine() -> None:
    with blocking() as engine:
        assert engine.generate("abc", SIX).text == answer_text("abc", 6, 2)
        deltas: list[Delta] = list(engine.stream("abc", SIX))
        assert "".join(delta.text for delta in deltas) == answer_text("abc", 6, 2)
        many = engine.generate_many(["a", "b", "c"], SIX, max_concurrent=2)
        assert [done.text for done in many] == [answer_text(prompt, 6, 2) for prompt in "abc"]
        assert engine.engine.statistics().finished_requests == 5
        assert not engine.abort("unknown")


def test_it_may_be_shared_by_threads() -> None:
    with blocking() as engine, ThreadPoolExecutor(8) as pool:
        prompts = [f"prompt {number}" for number in range(24)]
        texts = list(pool.map(lambda prompt: engine.generate(prompt, SIX).text, prompts))
        assert texts == [answer_text(prompt, 6, 2) for prompt in prompts]


def test_an_abort_from_another_thread_ends_a_stream() -> None:
    with blocking() as engine:
        stream = engine.stream("abc", SamplingParams(max_tokens=1500), request_id="r")
        next(stream)
        assert engine.abort("r")
        rest = list(stream)
        assert rest[-1].finish_reason == "abort"


def test_leaving_an_iteration_early_aborts_the_request() -> None:
    with blocking() as engine:
        for _ in engine.stream("abc", SamplingParams(max_tokens=1500)):
            break
        for _ in range(2000):
            now = engine.engine.statistics()
            if not (now.running or now.waiting):
                break
            engine.abort("wake the portal")
        assert not engine.engine.statistics().kv_usage


def test_the_result_of_a_stream_and_its_receipt() -> None:
    objects: list[bytes] = []

    async def keep(data: bytes) -> str:
        objects.append(bytes(data))
        return "kept"

    with blocking() as engine:
        whole = engine.generate("abc", SIX)
        stream = engine.stream("abc", SIX, request_id="r", artifact=ArtifactRequest(target=SinkTarget(keep)))
        with pytest.raises(EngineError, match="not entered"):
            _ = stream.result
        text = next(stream).text
        assert stream.request_id == "r"
        with pytest.raises(EngineError, match="read it to its end"):
            _ = stream.result
        text += "".join(delta.text for delta in stream)
        done = stream.result
        assert text == done.text == whole.text and done.token_ids == whole.token_ids
        assert done.artifact is not None and (done.artifact.state, done.artifact.object_id) == ("ready", "kept")
        assert hashlib.sha256(objects[0]).hexdigest() == done.artifact.sha256
        assert list(stream) == []
    assert stream.result is done


@pytest.mark.parametrize("leave", ["close", "with", "drop"])
def test_a_stream_that_is_left_early_is_aborted(leave: str) -> None:
    with blocking() as engine:
        stream = engine.stream("abc", SamplingParams(max_tokens=1500))
        if leave == "with":
            with stream:
                next(stream)
        next(stream, None)
        if leave == "close":
            stream.close()
        elif leave == "drop":
            del stream
        assert not engine.engine.request_ids
        if leave != "drop":
            assert list(stream) == []


def test_errors_are_the_engine_s_own_and_it_serves_on() -> None:
    with blocking() as engine:
        with pytest.raises(InvalidRequestError, match="empty"):
            engine.generate("")
        with pytest.raises(InvalidRequestError, match="empty"):
            list(engine.stream(""))
        assert engine.generate("abc", SIX).text == answer_text("abc", 6, 2)


USES: list[Callable[[BlockingEngine], Any]] = [
    lambda engine: engine.generate("x"),
    lambda engine: engine.generate_many(["x"]),
    lambda engine: list(engine.stream("x")),
    lambda engine: engine.abort("x"),
    lambda engine: engine.engine,
]


@pytest.mark.parametrize("use", USES)
def test_outside_the_block_every_use_is_refused_and_says_how(use: Callable[[BlockingEngine], Any]) -> None:
    engine = blocking()
    with pytest.raises(EngineClosedError, match="with"):
        use(engine)
    with engine:
        pass
    with pytest.raises(EngineClosedError, match="with"):
        use(engine)
    with pytest.raises(EngineClosedError, match="make a new one"), engine:
        pass


def test_an_exception_in_the_block_comes_out_as_it_is_and_no_thread_is_left() -> None:
    before = set(threading.enumerate())
    error = ValueError("mine")
    with pytest.raises(ValueError, match="mine") as caught, blocking() as engine:
        engine.generate("abc", SIX)
        raise error
    assert caught.value is error
    assert set(threading.enumerate()) == before


def test_closing_ends_the_call_of_another_thread() -> None:
    outcomes: list[BaseException] = []

    def call(engine: BlockingEngine) -> None:
        try:
            engine.generate("abc", SamplingParams(max_tokens=2000))
        except BaseException as error:
            outcomes.append(error)

    with blocking() as engine:
        thread = threading.Thread(target=call, args=(engine,))
        thread.start()
        while not engine.engine.statistics().running:
            pass
    thread.join(10)
    assert not thread.is_alive()
    assert [type(error) for error in outcomes] == [EngineClosedError]


def test_a_failing_start_is_raised_and_may_be_tried_again() -> None:
    makes = iter([failing_engine, letters_engine])
    engine = BlockingEngine(lambda: next(makes)())
    with pytest.raises(EngineDeadError, match="no device"), engine:
        pass
    with engine:
        assert engine.generate("abc", SIX).text == answer_text("abc", 6, 2)


def failing_engine() -> Any:
    async def start(config: object, on_progress: object) -> Any:
        raise EngineDeadError("no device")

    engine = letters_engine()
    engine._start = start
    return engine
