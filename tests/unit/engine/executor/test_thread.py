"""The thread executor: order, cancellation, a failing build, a dying thread, and what is left after closing."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

import anyio
import anyio.to_thread
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


@dataclass
class Begun:
    """A step on a device: done when its gate opens."""

    step_id: int
    worker: OverlappedWorker
    gate: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def ready(self) -> bool:
        if isinstance(self.error, ValueError):
            raise self.error
        return self.gate.is_set()

    def finish(self) -> StepResult:
        assert self.gate.wait(30)
        self.worker.notes.append(f"finish {self.step_id}")
        if self.error is not None:
            raise self.error
        return StepResult(step_id=self.step_id, token_ids=[], logprobs=[])


@dataclass
class OverlappedWorker:
    """Steps begin at once; what `fails` says begins with an error, or ends with it."""

    notes: list[str] = field(default_factory=list)
    steps: dict[int, Begun] = field(default_factory=dict)
    begin_errors: dict[int, BaseException] = field(default_factory=dict)
    open_at_once: bool = False
    begun: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def begin(self, plan: StepPlan) -> Begun:
        self.notes.append(f"begin {plan.step_id}")
        if plan.step_id in self.begin_errors:
            self.begun.release()
            raise self.begin_errors[plan.step_id]
        step = self.steps[plan.step_id] = Begun(plan.step_id, self)
        if self.open_at_once:
            step.gate.set()
        self.begun.release()
        return step

    def close(self) -> None:
        self.notes.append("close")


async def overlapped(worker: OverlappedWorker) -> ThreadExecutor:
    executor = ThreadExecutor()
    await executor.start(lambda: worker)
    return executor


async def wait_for_begun(worker: OverlappedWorker, count: int = 1) -> None:
    for _ in range(count):
        assert await anyio.to_thread.run_sync(lambda: worker.begun.acquire(timeout=30))


@pytest.mark.row("ENG-ASYNC-SCHED", "The next step is scheduled while the current one still runs")
async def test_the_next_step_begins_while_the_device_is_at_the_last_one() -> None:
    worker = OverlappedWorker()
    executor = await overlapped(worker)
    pending = [executor.submit(plan(0)), executor.submit(plan(1))]
    await wait_for_begun(worker, 2)
    worker.steps[0].gate.set()
    assert (await pending[0].wait()).step_id == 0
    assert worker.notes == ["begin 0", "begin 1", "finish 0"]
    pending.append(executor.submit(plan(2)))
    await wait_for_begun(worker)
    for step in worker.steps.values():
        step.gate.set()
    assert [(await step.wait()).step_id for step in pending] == [0, 1, 2]
    assert worker.notes[-2:] == ["finish 1", "finish 2"]
    await executor.aclose()
    assert worker.notes[-1] == "close" and worker_threads() == 0


async def test_what_is_ready_is_delivered_before_the_next_step_begins() -> None:
    """On a CPU `begin` computes the whole step: its reader must not wait for the one behind it."""
    worker = OverlappedWorker(open_at_once=True)
    executor = await overlapped(worker)
    pending = [executor.submit(plan(step_id)) for step_id in range(3)]
    for step in pending:
        await step.wait()
    assert worker.notes == [f"{what} {step_id}" for step_id in range(3) for what in ("begin", "finish")]
    await executor.aclose()


async def test_calls_see_no_step_on_its_way() -> None:
    worker = OverlappedWorker()
    executor = await overlapped(worker)
    step = executor.submit(plan(0))
    await wait_for_begun(worker)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(executor.call, lambda: worker.notes.append("call"))
        await anyio.wait_all_tasks_blocked()
        worker.steps[0].gate.set()
    assert worker.notes == ["begin 0", "finish 0", "call"]
    await step.wait()
    await executor.aclose()


async def test_closing_waits_for_what_the_device_is_at() -> None:
    worker = OverlappedWorker()
    executor = await overlapped(worker)
    step = executor.submit(plan(0))
    await wait_for_begun(worker)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(executor.aclose)
        await anyio.wait_all_tasks_blocked()
        worker.steps[0].gate.set()
    assert worker.notes == ["begin 0", "finish 0", "close"]
    assert (await step.wait()).step_id == 0


@pytest.mark.parametrize("where", ["begin", "ready", "finish"])
async def test_an_error_fails_its_own_step(where: str) -> None:
    worker = OverlappedWorker()
    if where == "begin":
        worker.begin_errors[1] = RuntimeError("the device says no")
    executor = await overlapped(worker)
    pending = [executor.submit(plan(step_id)) for step_id in range(3)]
    await wait_for_begun(worker, 3)
    if where != "begin":
        error: type[Exception] = ValueError if where == "ready" else RuntimeError
        worker.steps[1].error = error("the device says no")
    for step in worker.steps.values():
        step.gate.set()
    assert (await pending[0].wait()).step_id == 0
    with pytest.raises((RuntimeError, ValueError), match="the device says no"):
        await pending[1].wait()
    assert (await pending[2].wait()).step_id == 2
    await executor.aclose()


async def test_a_dying_thread_takes_the_steps_on_their_way_with_it() -> None:
    worker = OverlappedWorker(begin_errors={1: SystemExit("gone")})
    executor = await overlapped(worker)
    pending = [executor.submit(plan(step_id)) for step_id in range(3)]
    for step in pending:
        with pytest.raises(EngineDeadError, match="gone"):
            await step.wait()
    await executor.aclose()


async def test_a_call_behind_a_step_that_ends_the_thread_hears_of_it() -> None:
    """It waited for the step, in no queue any more."""
    worker = OverlappedWorker()
    executor = await overlapped(worker)
    step = executor.submit(plan(0))
    await wait_for_begun(worker)
    worker.steps[0].error = SystemExit("gone")

    async def call() -> None:
        with pytest.raises(EngineDeadError, match="gone"):
            await executor.call(lambda: worker.notes.append("call"))

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            await anyio.wait_all_tasks_blocked()
            worker.steps[0].gate.set()
        with pytest.raises(EngineDeadError, match="gone"):
            await step.wait()
        await executor.aclose()
    assert "call" not in worker.notes and worker_threads() == 0


async def test_closing_ends_also_where_the_last_step_ends_the_thread() -> None:
    worker = OverlappedWorker()
    executor = await overlapped(worker)
    step = executor.submit(plan(0))
    await wait_for_begun(worker)
    worker.steps[0].error = KeyboardInterrupt("gone")
    closed = anyio.Event()

    async def close() -> None:
        await executor.aclose()
        closed.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(close)
        await anyio.wait_all_tasks_blocked()
        worker.steps[0].gate.set()
        with anyio.move_on_after(60):
            await closed.wait()
        assert closed.is_set()
    with pytest.raises(EngineDeadError, match="gone"):
        await step.wait()
    assert worker_threads() == 0
