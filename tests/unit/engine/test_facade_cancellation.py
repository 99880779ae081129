"""Cancelling a call anywhere: the task is cancelled, the request is aborted, its blocks are free within two steps."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from infer import SamplingParams
from infer.engine.engine import Engine
from infer.errors import EngineError
from infer.testing.fake_engine import fake_engine
from served import answer, letters, letters_engine, settings, wait_until_idle

pytestmark = [pytest.mark.anyio, pytest.mark.row("X-ABORT", "in process: blocks are free within two steps")]

LONG = SamplingParams(max_tokens=1500, n=2)


async def generate(engine: Engine) -> None:
    await engine.generate("a prompt of several blocks, to hold something", LONG)


async def stream(engine: Engine) -> None:
    async with engine.stream("a prompt of several blocks, to hold something", LONG) as deltas:
        async for _ in deltas:
            pass


async def many(engine: Engine) -> None:
    await engine.generate_many(["first prompt", "second prompt", "third prompt"], LONG, max_concurrent=2)


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("call", [generate, stream, many])
async def test_cancelled_after_k_steps_of_the_event_loop_nothing_leaks(
    call: Callable[[Engine], Awaitable[None]], depth: int
) -> None:
    async with letters_engine(in_flight_depth=depth) as engine:
        for checkpoints in range(0, 40, 3 if depth == 1 else 7):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(call, engine)
                for _ in range(checkpoints):
                    await anyio.lowlevel.checkpoint()
                tasks.cancel_scope.cancel()
            await wait_until_idle(engine)
        done = await engine.generate("after all that", SamplingParams(max_tokens=5, seed=1))
        assert list(done.token_ids) == answer("after all that", 5, 1)
        assert not engine._requests


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("call", [generate, stream])
async def test_blocks_are_free_within_two_steps_while_others_go_on(
    call: Callable[[Engine], Awaitable[None]], depth: int
) -> None:
    async with letters_engine(in_flight_depth=depth) as engine:
        async with engine.stream("companion", SamplingParams(max_tokens=1000, seed=1)) as companion:
            await anext(companion)
            for _ in range(5):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(call, engine)
                    while engine.statistics().running < 3:
                        await anyio.lowlevel.checkpoint()
                    tasks.cancel_scope.cancel()
                before = engine.statistics().steps
                while engine.statistics().running > 1:
                    await anyio.lowlevel.checkpoint()
                assert engine.statistics().steps - before <= 2
            engine.abort(companion.request_id)
            async for _ in companion:
                pass
            count = len(companion.result.token_ids)
            assert list(companion.result.token_ids) == answer("companion", count, 1)
        await wait_until_idle(engine)


async def test_leaving_a_stream_early_aborts_it() -> None:
    async with letters_engine() as engine:
        async with engine.stream("abc", LONG) as deltas:
            await anext(deltas)
        await wait_until_idle(engine)
        with pytest.raises(ValueError, match="mine"):
            async with engine.stream("abc", LONG) as deltas:
                async for _ in deltas:
                    raise ValueError("mine")
        await wait_until_idle(engine)


async def test_a_timeout_cancels_like_any_other() -> None:
    async with fake_engine(letters, settings(), latency=0.002) as engine:
        with pytest.raises(TimeoutError):
            with anyio.fail_after(0.03):
                await engine.generate("abc", LONG)
        await wait_until_idle(engine, checkpoints=10_000)


async def test_cancelled_while_it_waits_in_the_queue() -> None:
    async with letters_engine(max_num_seqs=2) as engine:
        async with engine.stream("abc", LONG) as first:
            await anext(first)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(generate, engine)
                while engine.statistics().waiting < 1:
                    await anyio.lowlevel.checkpoint()
                tasks.cancel_scope.cancel()
            while engine.statistics().waiting:
                await anyio.lowlevel.checkpoint()
            assert engine.statistics().running == 2
        await wait_until_idle(engine)


async def test_a_delta_that_was_fetched_survives_a_cancelled_read() -> None:
    """Cancelling one read and reading again loses nothing."""
    async with fake_engine(letters, settings(), latency=0.001) as engine:
        seen: list[int] = []
        async with engine.stream("abc", SamplingParams(max_tokens=40, seed=1)) as deltas:
            while True:
                with anyio.move_on_after(0.0007):
                    try:
                        seen += (await anext(deltas)).token_ids
                    except StopAsyncIteration:
                        break
        assert seen == answer("abc", 40, 1)


async def test_two_readers_of_one_stream_are_told_apart() -> None:
    async with fake_engine(letters, settings(), latency=0.01) as engine:
        async with engine.stream("abc", SamplingParams(max_tokens=3)) as deltas, anyio.create_task_group() as tasks:

            async def read(results: list[Any]) -> None:
                try:
                    results.append(await anext(deltas))
                except Exception as error:
                    results.append(error)

            outcomes: list[Any] = []
            tasks.start_soon(read, outcomes)
            tasks.start_soon(read, outcomes)
        assert sum(isinstance(outcome, EngineError) for outcome in outcomes) == 1
