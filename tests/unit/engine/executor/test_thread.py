"""The thread executor: order, cancellation, a failing build, a dying thread, and what is left after closing."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

import anyio
import pytest

from infer.engine.executor.thread import ThreadExecutor
from infer.engine.step import StepPlan, StepResult
from infer.errors import EngineDeadError

pytestmark = pytest.mark.anyio


def plan(step_id: int) -> StepPlan:
    empty = array("i")
    return StepPlan(
        step_id=step_id,
        slots=empty,
        starts=empty,
        counts=empty,
        samples=array("b"),
        admissions=[],
        new_blocks=[],
        freed_slots=[],
    )


@dataclass
class RecordingWorker:
    """Notes what it did and on which thread; `on_step` may wait or raise."""

    on_step: Callable[[int], None] = lambda step_id: None
    done: list[int] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)
    closed: int = 0

    def execute(self, plan: StepPlan) -> StepResult:
        self.threads.add(threading.current_thread().name)
        self.on_step(plan.step_id)
        self.done.append(plan.step_id)
        return StepResult(step_id=plan.step_id, token_ids=[], logprobs=[])

    def close(self) -> None:
        self.threads.add(threading.current_thread().name)
        self.closed += 1


def worker_threads() -> int:
    return sum(thread.name.startswith("infer") for thread in threading.enumerate())


async def start(worker: RecordingWorker) -> ThreadExecutor:
    executor = ThreadExecutor()
    await executor.start(lambda: worker)
    return executor


async def test_steps_run_in_order_on_one_thread_and_close_ends_it() -> None:
    worker = RecordingWorker()
    executor = await start(worker)
    pending = [executor.submit(plan(step_id)) for step_id in range(5)]
    results = [await step.wait() for step in reversed(pending)]
    assert [result.step_id for result in results] == [4, 3, 2, 1, 0]
    assert worker.done == [0, 1, 2, 3, 4]
    await executor.aclose()
    assert worker.closed == 1
    assert worker.threads == {"infer-worker"}
    assert worker_threads() == 0


async def test_a_cancelled_wait_can_be_repeated() -> None:
    gate = threading.Event()
    executor = await start(RecordingWorker(on_step=lambda step_id: gate.wait(10) and None))
    pending = executor.submit(plan(7))
    with anyio.move_on_after(0.01) as scope:
        await pending.wait()
    assert scope.cancelled_caught
    gate.set()
    assert (await pending.wait()).step_id == 7
    await executor.aclose()


async def test_a_step_that_raises_fails_alone() -> None:
    def on_step(step_id: int) -> None:
        if step_id == 1:
            raise ValueError("bad step")

    executor = await start(RecordingWorker(on_step))
    pending = [executor.submit(plan(step_id)) for step_id in range(3)]
    assert (await pending[0].wait()).step_id == 0
    with pytest.raises(ValueError, match="bad step"):
        await pending[1].wait()
    assert (await pending[2].wait()).step_id == 2
    await executor.aclose()


@pytest.mark.row("ENG-CORE-BUSY-LOOP", "a dead worker fails every pending and later call with the root cause (thread)")
@pytest.mark.parametrize("death", [SystemExit("killed"), KeyboardInterrupt("killed"), GeneratorExit("killed")])
async def test_a_dead_thread_fails_pending_and_later_steps(death: BaseException) -> None:
    def on_step(step_id: int) -> None:
        raise death

    executor = await start(RecordingWorker(on_step))
    pending = [executor.submit(plan(step_id)) for step_id in range(3)]
    with anyio.fail_after(30):
        for step in pending:
            with pytest.raises(EngineDeadError, match="killed") as caught:
                await step.wait()
            assert caught.value.__cause__ is death
        with pytest.raises(EngineDeadError, match="killed"):
            await executor.submit(plan(9)).wait()
        await executor.aclose()
    assert worker_threads() == 0


async def test_a_failing_build_is_raised_and_leaves_no_thread() -> None:
    executor = ThreadExecutor()

    def build() -> RecordingWorker:
        raise RuntimeError("no such device")

    with pytest.raises(RuntimeError, match="no such device"):
        await executor.start(build)
    with pytest.raises(EngineDeadError, match="before the worker was built"):
        executor.submit(plan(0))
    await executor.aclose()
    assert worker_threads() == 0


async def test_a_worker_whose_build_was_cancelled_is_closed_all_the_same() -> None:
    """The build runs on after its waiter has gone; what it made holds memory and files."""
    gate, worker = threading.Event(), RecordingWorker()
    executor = ThreadExecutor()

    def build() -> RecordingWorker:
        gate.wait(10)
        return worker

    with anyio.move_on_after(0.01):
        await executor.start(build)
    gate.set()
    await executor.aclose()
    assert worker.closed == 1
    assert worker_threads() == 0


async def test_closing_finishes_the_running_step_and_drops_the_rest() -> None:
    gate, running = threading.Event(), threading.Event()

    def on_step(step_id: int) -> None:
        running.set()
        gate.wait(10)

    worker = RecordingWorker(on_step)
    executor = await start(worker)
    pending = [executor.submit(plan(step_id)) for step_id in range(4)]
    await anyio.to_thread.run_sync(running.wait, 10)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(executor.aclose)
        await anyio.wait_all_tasks_blocked()
        gate.set()
    assert worker.done == [0]
    assert worker.closed == 1
    assert (await pending[0].wait()).step_id == 0
    for late in (*pending[1:], executor.submit(plan(9))):
        with pytest.raises(EngineDeadError, match="closed"):
            await late.wait()


async def test_closing_cannot_be_cancelled_half_way() -> None:
    worker = RecordingWorker()
    executor = await start(worker)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await executor.aclose()
    assert worker.closed == 1
    assert worker_threads() == 0


async def test_an_error_while_closing_the_worker_is_raised_after_the_thread_ended() -> None:
    class Stuck(RecordingWorker):
        def close(self) -> None:
            raise OSError("cannot release")

    executor = await start(Stuck())
    with pytest.raises(OSError, match="cannot release"):
        await executor.aclose()
    assert worker_threads() == 0


async def test_a_function_runs_on_the_thread_between_steps() -> None:
    worker = RecordingWorker()
    executor = await start(worker)
    executor.submit(plan(0))
    assert await executor.call(lambda: (threading.current_thread().name, list(worker.done))) == ("infer-worker", [0])
    await executor.aclose()


async def test_closing_twice_closes_once() -> None:
    worker = RecordingWorker()
    executor = await start(worker)
    for _ in range(2):
        with anyio.fail_after(30):
            await executor.aclose()
    assert worker.closed == 1
