"""How requests and the engine end: aborts, deadlines, failing steps, a dead worker. On asyncio, uvloop and trio.
The real worker on a random tiny Llama; a companion request runs on beside each request that ends early."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from infer import Engine, EngineClosedError, EngineDeadError, SamplingParams, StepError
from infer.engine.request import Request

from .engine_support import (
    ARCHITECTURES,
    assert_nothing_held,
    engine_config,
    greedy,
    parts_of,
    prompt,
    record,
    write_checkpoint,
)

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), ARCHITECTURES["llama"])


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(30):
        while not condition():  # noqa: ASYNC110 - the engine's own state, which tells nobody
            await anyio.sleep(0.001)


async def end_early(engine: Engine, how: str) -> tuple[Request, int]:
    """Run a long request in its own task until it has 5 tokens, then end it as `how` says.
    Returns the request, and how many steps were submitted between the engine's being told and the last block's being
    free (the event loop may deliver a cancellation a moment after it was asked for)."""
    trace = record(engine)
    told_at: list[int] = []
    mailbox = parts_of(engine).mailbox
    post_end = mailbox.post_end

    def watched(*args: Any) -> None:
        told_at.append(len(trace.plans))
        post_end(*args)

    mailbox.post_end = watched  # type: ignore[method-assign]
    free_at: list[int] = []
    kv = parts_of(engine).scheduler.kv
    release = kv.release

    def released(request: Request) -> None:
        release(request)
        if request.request_id == "victim":
            free_at.append(len(trace.plans))

    kv.release = released  # type: ignore[method-assign]
    results: list[Any] = []
    scope, over = anyio.CancelScope(), anyio.Event()

    async def stream() -> None:
        async with engine.stream(prompt(40), greedy(400), request_id="victim") as stream:
            async for _ in stream:
                if how == "leave the stream" and len(stream._choices[0].token_ids) >= 5:
                    return
        results.append(stream.result)

    async def generate() -> None:
        results.append(await engine.generate(prompt(40), greedy(400), request_id="victim"))

    async def reader() -> None:
        with scope:
            await (stream() if "stream" in how else generate())
        over.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reader)
        await until(lambda: "victim" in engine._requests)
        request = engine._requests["victim"][0]
        if how == "leave the stream":
            await over.wait()
        else:
            await until(lambda: request.num_output >= 5)
            if how.startswith("cancel"):
                scope.cancel()
            else:
                assert engine.abort("victim")
        await until(lambda: request.finish_reason is not None and not request.blocks.tables)
        steps = free_at[-1] - told_at[0]
        await over.wait()
    if how.startswith("abort"):
        assert results[0].finish_reason == "abort" and len(results[0].token_ids) >= 5
    else:
        assert not results
    return request, steps


@pytest.mark.row("X-ABORT", "in process: blocks free within two steps, in stream and non-stream mode")
@pytest.mark.parametrize(
    "how", ["cancel generate", "cancel stream", "leave the stream", "abort generate", "abort a stream"]
)
async def test_blocks_are_free_within_two_steps(model: Path, how: str) -> None:
    async with Engine(engine_config(model)) as engine:
        async with engine.stream(prompt(10), greedy(500)) as companion:
            await anext(companion)
            request, steps = await end_early(engine, how)
            assert steps <= 2 and request.blocks.tables == [] and "victim" not in engine._requests
            held = parts_of(engine).scheduler.running
            assert [r.request_id for r in held] == [companion.request_id]
            assert not engine.abort("victim")  # it is gone
        await until(lambda: parts_of(engine).scheduler.num_unfinished == 0)
        assert_nothing_held(engine)


@pytest.mark.row("X-ABORT", "in process: blocks free within two steps, in stream and non-stream mode")
async def test_all_choices_end_together(model: Path) -> None:
    async with Engine(engine_config(model)) as engine:
        trace = record(engine)
        async with engine.stream(prompt(40), SamplingParams(seed=1, n=4, max_tokens=300, ignore_eos=True)) as stream:
            async for delta in stream:
                if delta.choice_index == 3:
                    break
        since = len(trace.plans)
        await until(lambda: parts_of(engine).scheduler.num_unfinished == 0)
        assert len(trace.plans) - since <= 2
        assert_nothing_held(engine)


async def test_a_waiting_request_can_be_cancelled(model: Path) -> None:
    async with Engine(engine_config(model, scheduler={"max_num_seqs": 1})) as engine:
        async with engine.stream(prompt(10), greedy(300)) as stream:
            await anext(stream)
            with anyio.move_on_after(0.05) as scope:
                await engine.generate(prompt(20), greedy(4))
            assert scope.cancelled_caught
            await until(lambda: engine.statistics().waiting == 0)
        assert len((await engine.generate(prompt(20), greedy(4))).token_ids) == 4


class SteppedClock:
    """A clock that a submitted step moves on by one second: limits are counted in steps, not on this machine."""

    def __init__(self, engine: Engine) -> None:
        self.now = 0.0
        parts = parts_of(engine)
        engine._clock = parts.loop._clock = parts.scheduler._clock = lambda: self.now
        submit = parts.executor.submit

        def stepped(plan: Any) -> Any:
            self.now += 1.0
            return submit(plan)

        parts.executor.submit = stepped


@pytest.mark.row("X-DEADLINE", "finishes with its own reason within one step of the limit")
@pytest.mark.parametrize("depth", [1, 2])
async def test_a_deadline_ends_within_one_step(model: Path, depth: int) -> None:
    async with Engine(engine_config(model, scheduler={"in_flight_depth": depth})) as engine:
        SteppedClock(engine)
        trace = record(engine)
        done = await engine.generate(prompt(20), greedy(300), deadline=12)
        assert done.finish_reason == "deadline" and done.stop_reason is None
        assert 12 <= len(trace.plans) <= 12 + 1
        # A step in flight when the limit passes is void: at depth 2 the last two tokens are not delivered.
        assert 12 - depth <= len(done.token_ids) <= 12
        full = await engine.generate(prompt(20), greedy(12))
        assert full.token_ids[: len(done.token_ids)] == done.token_ids
        assert full.finish_reason == "length"
        assert_nothing_held(engine)


@pytest.mark.row("X-DEADLINE", "finishes with its own reason within one step of the limit")
async def test_a_deadline_in_the_queue_and_for_every_choice(model: Path) -> None:
    async with Engine(engine_config(model, scheduler={"max_num_seqs": 2, "max_num_active_seqs": 1})) as engine:
        SteppedClock(engine)
        async with engine.stream(prompt(10), greedy(40)) as companion:
            await anext(companion)
            late = await engine.generate(prompt(20), greedy(10, n=2), deadline=5)
            assert [choice.finish_reason for choice in late.choices] == ["deadline"] * 2
            assert [choice.token_ids for choice in late.choices] == [(), ()]
            async for _ in companion:
                pass
        assert companion.result.finish_reason == "length" and len(companion.result.token_ids) == 40


async def pending_calls(engine: Engine, plant: Callable[[], None]) -> list[BaseException]:
    """Five generates and a stream are running; `plant` makes the next step fail. What each of them raises."""
    errors: list[BaseException] = []

    async def generate(seed: int) -> None:
        try:
            await engine.generate(prompt(10 + seed), greedy(400))
        except Exception as error:
            errors.append(error)

    async def stream() -> None:
        try:
            async with engine.stream(prompt(30), greedy(400)) as stream:
                async for _ in stream:
                    pass
        except Exception as error:
            errors.append(error)

    async with anyio.create_task_group() as tasks:
        for seed in range(5):
            tasks.start_soon(generate, seed)
        tasks.start_soon(stream)
        await until(lambda: engine.statistics().running == 6)
        with anyio.fail_after(2):
            plant()
            await until(lambda: len(errors) == 6)
    return errors


def fail_next_step(engine: Engine, error: BaseException, *, num_rows: int = 6) -> Callable[[], None]:
    """The worker's next step with so many rows raises, once. (At depth 2 a step may be planned already that lacks the
    request that arrived last: that one would rightly go on.)"""
    worker = parts_of(engine).executor._worker
    begin = worker.begin

    def failing(plan: Any) -> Any:
        if len(plan.slots) < num_rows:
            return begin(plan)
        del worker.begin  # the class's own method again
        raise error

    def plant() -> None:
        worker.begin = failing

    return plant


@pytest.mark.row(
    "ENG-CORE-BUSY-LOOP", "thread: every pending call raises an engine-dead error with the root cause in 2 s"
)
@pytest.mark.parametrize("depth", [1, 2])
async def test_a_dead_worker_fails_every_call(model: Path, depth: int) -> None:
    async with Engine(engine_config(model, scheduler={"in_flight_depth": depth})) as engine:
        cause = SystemExit("planted")
        errors = await pending_calls(engine, fail_next_step(engine, cause))
        assert all(type(error) is EngineDeadError for error in errors)
        assert all(error.__cause__ is cause and "planted" in str(error) for error in errors)
        assert len({id(error) for error in errors}) == 6  # each call has its own traceback
        assert not engine.is_alive
        with pytest.raises(EngineDeadError, match="planted") as refused:
            await engine.generate(prompt(5), greedy(2))
        assert refused.value.__cause__ is cause
    assert not [thread for thread in threading.enumerate() if thread.name == "infer-worker"]


@pytest.mark.row(
    "ENG-CORE-BUSY-LOOP", "thread: a step that raises ends its requests with the cause, the engine goes on"
)
@pytest.mark.parametrize("error", [MemoryError("planted"), ValueError("planted")], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("depth", [1, 2])
async def test_a_failed_step_fails_its_requests_alone(model: Path, error: Exception, depth: int) -> None:
    async with Engine(engine_config(model, scheduler={"in_flight_depth": depth})) as engine:
        before = await engine.generate(prompt(30), greedy(12))
        errors = await pending_calls(engine, fail_next_step(engine, error))
        assert all(type(e) is StepError and e.__cause__ is error and "planted" in str(e) for e in errors)
        assert engine.is_alive
        assert_nothing_held(engine)
        assert (await engine.generate(prompt(30), greedy(12))).token_ids == before.token_ids


async def test_leaving_the_engine_ends_its_requests(model: Path) -> None:
    """A stream that outlives its engine raises; nothing waits for ever."""
    async with anyio.create_task_group() as tasks:
        seen: list[BaseException] = []

        async def outlive(engine: Engine) -> None:
            try:
                await engine.generate(prompt(10), greedy(500))
            except Exception as error:
                seen.append(error)

        async with Engine(engine_config(model)) as engine:
            tasks.start_soon(outlive, engine)
            await until(lambda: engine.statistics().running == 1)
    assert len(seen) == 1 and isinstance(seen[0], EngineDeadError | EngineClosedError)
    assert not [thread for thread in threading.enumerate() if thread.name == "infer-worker"]


async def test_a_closed_engine_refuses(model: Path) -> None:
    engine = Engine(engine_config(model))
    with pytest.raises(EngineClosedError, match="new"):
        await engine.generate(prompt(5))
    async with engine:
        pass
    with pytest.raises(EngineClosedError, match="closed"):
        await engine.generate(prompt(5))
    with pytest.raises(EngineClosedError, match="closed"):
        await engine.__aenter__()
