"""The engine's life: entering, leaving, closing under load, death, several at once, and what is left behind."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from infer import Engine, EngineConfig, SamplingParams
from infer.engine.executor.thread import ThreadExecutor
from infer.engine.startup import EngineParts, assemble
from infer.engine.step import StepPlan, StepResult
from infer.errors import EngineClosedError, EngineDeadError, StepError
from infer.testing.fake_engine import fake_engine
from infer.testing.fake_executor import FakeWorker
from served import answer, letters, letters_engine, settings

pytestmark = pytest.mark.anyio

TEN = SamplingParams(max_tokens=10, seed=1)
LONG = SamplingParams(max_tokens=1500)


def threaded_engine(on_step: Callable[[StepPlan], None] = lambda plan: None, **scheduler: Any) -> Engine:
    """The fake model behind the real thread executor."""
    inner = fake_engine(letters, settings(**scheduler))

    class Worker(FakeWorker):
        def execute(self, plan: StepPlan) -> StepResult:
            on_step(plan)
            return super().execute(plan)

    async def start(config: EngineConfig, on_progress: Any) -> EngineParts:
        fake: EngineParts = await inner._start(config, on_progress)
        executor = ThreadExecutor()
        cache = fake.resolved.cache
        await executor.start(lambda: Worker(cache.groups, cache.block_size, letters))
        planned = SimpleNamespace(
            registry=fake.registry,
            model=fake.model,
            resolved=fake.resolved,
            tokenizer=fake.tokenizer,
            template=fake.template,
            guided=fake.guided,
        )
        return assemble(planned, executor)

    return Engine(inner.config, _start=start)


async def check(engine: Engine, prompt: str = "hello") -> None:
    assert list((await engine.generate(prompt, TEN)).token_ids) == answer(prompt, 10, 1)


async def test_outside_the_block_every_use_is_refused_and_says_how() -> None:
    engine = letters_engine()
    for state in ("new", "closed"):
        assert not engine.is_alive
        for use in (lambda: engine.abort("x"), engine.statistics, lambda: engine.resolved, lambda: engine.tokenizer):
            with pytest.raises(EngineClosedError, match=f"the engine is {state}; use it inside `async with"):
                use()
        for call in (engine.generate("x"), engine.reset_prefix_cache(), engine.generate_many(["x"])):
            with pytest.raises(EngineClosedError, match=state):
                await call
        with pytest.raises(EngineClosedError, match=state):
            async with engine.stream("x"):
                pass
        if state == "new":
            async with engine:
                assert engine.is_alive


async def test_an_engine_is_entered_once() -> None:
    engine = letters_engine()
    async with engine:
        with pytest.raises(EngineClosedError, match="make a new one"):
            await engine.__aenter__()
        await check(engine)
    with pytest.raises(EngineClosedError, match="make a new one"):
        async with engine:
            pass


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), SystemExit(3)])
async def test_an_exception_in_the_block_comes_out_as_it_is(error: BaseException) -> None:
    engine = letters_engine()
    with pytest.raises(type(error)) as caught:
        async with engine:
            await check(engine)
            raise error
    assert caught.value is error
    with pytest.raises(EngineClosedError, match="closed"):
        engine.statistics()


async def test_leaving_while_others_use_it_ends_their_requests() -> None:
    outcomes: list[str] = []

    async def user(engine: Engine) -> None:
        try:
            await engine.generate("abc", LONG)
        except EngineClosedError as error:
            outcomes.append(str(error))

    async with anyio.create_task_group() as tasks, letters_engine() as engine:
        for _ in range(3):
            tasks.start_soon(user, engine)
        while engine.statistics().running < 3:
            await anyio.lowlevel.checkpoint()
    assert outcomes == ["the engine was closed while the request was running"] * 3


async def test_a_cancelled_block_closes_and_stays_cancelled() -> None:
    engine = letters_engine()
    with anyio.CancelScope() as scope:
        async with engine:
            await check(engine)
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert not engine.is_alive


async def test_a_timeout_around_the_block_is_a_timeout() -> None:
    with pytest.raises(TimeoutError):
        with anyio.fail_after(0.05):
            async with letters_engine() as engine:
                await check(engine)
                await anyio.sleep_forever()


async def test_it_lives_inside_task_groups_and_beside_other_engines() -> None:
    async with (
        anyio.create_task_group() as tasks,
        letters_engine() as first,
        fake_engine(letters, settings(), max_position=64) as second,
        anyio.create_task_group() as inner,
    ):
        tasks.start_soon(anyio.sleep, 0)
        for engine in (first, second):
            for _ in range(2):
                inner.start_soon(check, engine, "beside")
        await check(first)
        assert (first.max_model_len, second.max_model_len) == (2048, 64)


async def test_engines_may_be_left_in_any_order_of_nesting() -> None:
    async with letters_engine() as first:
        async with letters_engine() as second:
            await check(second)
        await check(first)


async def test_a_start_that_fails_leaves_the_engine_closed() -> None:
    async def start(config: EngineConfig, on_progress: Any) -> EngineParts:
        raise OSError("no model there")

    engine = Engine(EngineConfig(), _start=start)
    with pytest.raises(OSError, match="no model there"):
        async with engine:
            pass
    with pytest.raises(EngineClosedError, match="closed"):
        await engine.generate("x")


async def test_a_cancelled_start_leaves_the_engine_closed() -> None:
    async def start(config: EngineConfig, on_progress: Any) -> EngineParts:
        await anyio.sleep_forever()
        raise AssertionError

    engine = Engine(EngineConfig(), _start=start)
    with anyio.move_on_after(0.01) as scope:
        async with engine:
            pass
    assert scope.cancelled_caught
    with pytest.raises(EngineClosedError, match="closed"):
        await engine.generate("x")


async def test_a_failed_step_is_raised_with_its_cause_and_the_next_request_is_served() -> None:
    def on_step(plan: StepPlan) -> None:
        if plan.step_id == 3:
            raise MemoryError("no memory for the step")

    async with threaded_engine(on_step) as engine:
        with pytest.raises(StepError, match="no memory for the step") as caught:
            await engine.generate("abc", LONG)
        assert isinstance(caught.value.__cause__, MemoryError)
        await check(engine)
        assert engine.is_alive


async def test_each_request_of_a_failed_step_raises_an_error_of_its_own() -> None:
    def on_step(plan: StepPlan) -> None:
        if len(plan.slots) == 2:
            raise MemoryError("no memory")

    async with threaded_engine(on_step) as engine:
        errors: list[BaseException] = []

        async def one(prompt: str) -> None:
            with pytest.raises(StepError) as caught:
                await engine.generate(prompt, LONG)
            errors.append(caught.value)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one, "a")
            tasks.start_soon(one, "b")
        assert errors[0] is not errors[1]


@pytest.mark.row("ENG-CORE-BUSY-LOOP", "worker death: pending and later calls raise with the root cause within 2 s")
@pytest.mark.parametrize("pending", [1, 5])
async def test_a_dead_worker_is_told_to_everyone(pending: int) -> None:
    def on_step(plan: StepPlan) -> None:
        if plan.step_id == 3:
            raise SystemExit("the driver went away")

    async with threaded_engine(on_step) as engine:
        errors: list[EngineDeadError] = []

        async def one(number: int) -> None:
            with pytest.raises(EngineDeadError, match="the driver went away") as caught:
                await engine.generate(f"prompt {number}", LONG)
            errors.append(caught.value)

        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                for number in range(pending):
                    tasks.start_soon(one, number)
            assert len(errors) == pending
            assert all(isinstance(error.__cause__, SystemExit) for error in errors)
            assert not engine.is_alive
            for later in (engine.generate("x"), engine.reset_prefix_cache(), engine.generate_many(["a", "b"])):
                with pytest.raises(EngineDeadError, match="the driver went away"):
                    await later
            with pytest.raises(EngineDeadError, match="the driver went away"):
                async with engine.stream("x"):
                    pass


async def test_a_reset_that_waits_when_the_worker_dies_is_told_too() -> None:
    gate, inside = threading.Event(), threading.Event()

    def on_step(plan: StepPlan) -> None:
        inside.set()
        gate.wait(10)
        raise SystemExit("gone")

    async with threaded_engine(on_step) as engine:
        refused: list[str] = []

        async def reset() -> None:
            with pytest.raises(EngineDeadError, match="gone"):
                await engine.reset_prefix_cache()
            refused.append("reset")

        async def generate() -> None:
            with pytest.raises(EngineDeadError, match="gone"):
                await engine.generate("x")
            refused.append("generate")

        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(generate)
                await anyio.to_thread.run_sync(inside.wait, 10)
                tasks.start_soon(reset)
                await anyio.wait_all_tasks_blocked()
                gate.set()
        assert sorted(refused) == ["generate", "reset"]


@pytest.mark.row("ENG-CORE-BUSY-LOOP", "100 start/stop cycles leave no thread and no open file (thread part)")
async def test_a_hundred_cycles_leave_nothing() -> None:
    await anyio.to_thread.run_sync(lambda: None)  # the event loop's own helper thread, if it keeps one
    await cycle()
    threads, files, loops = engine_threads(), open_files(), engine_loops()
    for _ in range(100):
        await cycle()
    assert engine_threads() == threads == []
    assert open_files() == files
    assert engine_loops() <= loops, "an engine is still referred to"


async def cycle() -> None:
    async with threaded_engine() as engine:
        await engine.generate("abc", SamplingParams(max_tokens=2))


def engine_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "infer" in thread.name]


def engine_loops() -> int:
    """Live ones in this process; earlier tests may have left some to their tracebacks."""
    gc.collect()
    return sum(type(item).__name__ == "EngineLoop" for item in gc.get_objects())


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir())) if os.path.isdir("/proc/self/fd") else 0  # noqa: PTH112
