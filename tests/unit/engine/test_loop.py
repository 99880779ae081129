"""The loop: waking, deadlines, depth, failed steps and death, on a real event loop with scripted executors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from infer.engine.executor.thread import ThreadExecutor
from infer.engine.kv_cache.manager import KVCacheManager
from infer.engine.loop import EngineLoop
from infer.engine.mailbox import Mailbox
from infer.engine.outputs import ChoiceUpdate
from infer.engine.request import Request
from infer.engine.scheduler.scheduler import Scheduler
from infer.engine.step import StepPlan, StepResult
from infer.errors import EngineClosedError, EngineDeadError, StepError
from infer.testing.fake_executor import FakeExecutor, FakeWorker, hashed_token
from step_driver import cache_config, expected_tokens, full_group, new_request, output, scheduler_config

pytestmark = pytest.mark.anyio

TOKENS = hashed_token(500)


class Serving:
    """A running loop and what it runs on."""

    def __init__(self, executor: Callable[[FakeWorker], Any], depth: int, clock: Callable[[], float]) -> None:
        cache = cache_config(full_group(200))
        self.worker = FakeWorker(cache.groups, cache.block_size, TOKENS)
        self.scheduler = Scheduler(scheduler_config(max_num_batched_tokens=64), KVCacheManager(cache, "m"))
        self.mailbox = Mailbox()
        self.executor = executor(self.worker)
        self.loop = EngineLoop(self.scheduler, self.executor, self.mailbox, depth=depth, clock=clock)

    async def finish(self, request: Request) -> ChoiceUpdate:
        """Wait for the end; all updates merged."""
        merged = ChoiceUpdate(request.choice_index)
        with anyio.fail_after(30):
            while merged.finish_reason is None:
                for update in await request.outbox.take():
                    merged.token_ids += update.token_ids
                    merged.finish_reason, merged.error = update.finish_reason, update.error
        return merged


@asynccontextmanager
async def serving(
    *,
    executor: Callable[[FakeWorker], Any] = FakeExecutor,
    depth: int = 1,
    clock: Callable[[], float] = anyio.current_time,
) -> AsyncIterator[Serving]:
    served = Serving(executor, depth, clock)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(served.loop.run)
        yield served
        tasks.cancel_scope.cancel()


async def test_an_idle_loop_sleeps_until_something_is_posted() -> None:
    async with serving() as served:
        await anyio.wait_all_tasks_blocked()
        for arrival in range(3):
            request = new_request([arrival] * 10, 4, arrival=arrival)
            served.mailbox.post_request(request)
            update = await served.finish(request)
            assert update.token_ids == expected_tokens(request, TOKENS)
            await anyio.wait_all_tasks_blocked()
            assert served.scheduler.stats.steps == 4 * (arrival + 1), "an idle loop plans nothing"


@pytest.mark.parametrize("depth", [1, 2, 3])
async def test_depth_is_how_many_steps_are_out_at_once(depth: int) -> None:
    most = 0

    class Counting(FakeExecutor):
        def submit(self, plan: StepPlan) -> Any:
            nonlocal most
            pending = super().submit(plan)
            most = max(most, len(served.loop._in_flight) + 1)
            return pending

    async with serving(executor=Counting, depth=depth) as served:
        request = new_request(range(20), 10)
        served.mailbox.post_request(request)
        assert (await served.finish(request)).token_ids == expected_tokens(request, TOKENS)
    assert most == depth


@pytest.mark.row("X-DEADLINE", "finishes with its own reason within one step of the limit")
@pytest.mark.parametrize("depth", [1, 2])
async def test_a_deadline_ends_within_one_step(depth: int) -> None:
    """Each step takes one tick of the clock; the limit falls between two of them."""
    now = 0.0

    class Ticking(FakeExecutor):
        def submit(self, plan: StepPlan) -> Any:
            nonlocal now
            now += 1.0
            return super().submit(plan)

    async with serving(executor=Ticking, depth=depth, clock=lambda: now) as served:
        late = new_request(range(20), 100, deadline=5.5)
        other = new_request(range(30, 50), 12, arrival=1, deadline=1e9)
        for request in (late, other):
            served.mailbox.post_request(request)
        update = await served.finish(late)
        assert update.finish_reason == "deadline"
        assert update.token_ids == expected_tokens(late, TOKENS)[: len(update.token_ids)]
        assert len(update.token_ids) in (6 - depth, 7 - depth), "submitted by tick 6, booked depth - 1 steps later"
        assert (await served.finish(other)).finish_reason == "length"
        assert now < 20


async def test_a_deadline_reaches_a_request_that_still_waits() -> None:
    now = 0.0
    async with serving(clock=lambda: now) as served:
        served.scheduler.config = scheduler_config(max_num_seqs=1, max_num_batched_tokens=64)
        running, waiting = new_request([1] * 10, 50), new_request([2] * 10, 5, arrival=1, deadline=1.0)
        for request in (running, waiting):
            served.mailbox.post_request(request)
        await running.outbox.take()
        now = 2.0
        update = await served.finish(waiting)
        assert (update.finish_reason, update.token_ids) == ("deadline", [])


async def test_ended_requests_with_far_deadlines_are_not_kept() -> None:
    async with serving() as served:
        keeper = new_request([1] * 10, 1500, deadline=anyio.current_time() + 1e6)
        served.mailbox.post_request(keeper)
        for arrival in range(1, 300):
            request = new_request([arrival] * 5, 1, arrival=arrival, deadline=anyio.current_time() + 2e6)
            served.mailbox.post_request(request)
            await served.finish(request)
        assert keeper.finish_reason is None
        assert len(served.loop._deadlines) < 150


@pytest.mark.parametrize("depth", [1, 2, 3])
async def test_a_failed_step_ends_its_requests_and_the_loop_goes_on(depth: int) -> None:
    async with serving(depth=depth) as served:
        failure = RuntimeError("device lost a step")
        served.worker.fail_at = lambda plan: failure if plan.step_id == 3 else None
        first = new_request(range(20), 10)
        served.mailbox.post_request(first)
        update = await served.finish(first)
        assert isinstance(update.error, StepError) and update.error.__cause__ is failure
        second = new_request(range(20), 10, arrival=1)
        served.mailbox.post_request(second)
        assert (await served.finish(second)).token_ids == expected_tokens(second, TOKENS)
        assert served.loop.death is None


@pytest.mark.row("ENG-CORE-BUSY-LOOP", "worker death ends every pending request with the root cause (thread)")
@pytest.mark.parametrize("depth", [1, 2])
async def test_a_dead_worker_ends_every_request_with_the_root_cause(depth: int) -> None:
    executor = ThreadExecutor()
    async with serving(executor=lambda worker: executor, depth=depth) as served:
        await executor.start(lambda: DyingWorker(served.worker, at=2))
        requests = [new_request([arrival] * 10, 30, arrival=arrival) for arrival in range(40)]
        for request in requests:
            served.mailbox.post_request(request)
        with anyio.fail_after(30):
            for request in requests:
                update = await served.finish(request)
                assert isinstance(update.error, EngineDeadError)
                assert isinstance(update.error.__cause__, SystemExit)
        assert served.loop.death is not None
        await executor.aclose()


class DyingWorker:
    def __init__(self, worker: FakeWorker, at: int) -> None:
        self.worker, self.at = worker, at

    def execute(self, plan: StepPlan) -> StepResult:
        if plan.step_id == self.at:
            raise SystemExit("the worker was killed")
        return self.worker.execute(plan)

    def close(self) -> None:
        self.worker.close()


async def test_a_fault_of_the_control_plane_ends_every_request_too() -> None:
    async with serving() as served:
        request = new_request(range(20), 10)

        def broken(step: object) -> None:
            raise KeyError("a bug")

        served.scheduler.apply = broken  # type: ignore[method-assign,assignment]
        served.mailbox.post_request(request)
        update = await served.finish(request)
        assert isinstance(update.error, EngineDeadError)
        assert isinstance(update.error.__cause__, KeyError)
        assert "a bug" in str(update.error)


async def test_choices_that_have_not_started_end_with_the_engine_too() -> None:
    async with serving() as served:
        served.worker.fail_at = lambda plan: None
        first, second = new_request(range(400), 10), new_request(range(400), 10, arrival=1)
        second.choice_index, second.outbox, first.siblings = 1, first.outbox, (second,)

        def broken(step: object) -> None:
            raise KeyError("a bug")

        served.scheduler.apply = broken  # type: ignore[method-assign,assignment]
        served.mailbox.post_request(first)
        with anyio.fail_after(30):
            ended = {update.choice_index for update in await first.outbox.take()}
        assert ended == {0, 1}


async def test_leaving_ends_what_runs_and_says_that_the_engine_was_closed() -> None:
    request = new_request(range(20), 10**6)
    async with serving() as served:
        served.mailbox.post_request(request)
        await request.outbox.take()
    update = await served.finish(request)
    assert isinstance(update.error, EngineClosedError)


@pytest.mark.row("ENG-BATCH-QUEUE", "tokens at depth 2 equal depth 1; a step costs max(schedule, execute), not the sum")
async def test_at_depth_two_planning_hides_behind_execution() -> None:
    """A virtual clock: planning takes 3 ticks, a step 4. In turn that is 7 a step, overlapped it is 4."""
    spent, tokens = {}, {}
    for depth in (1, 2):
        device = VirtualDevice(plan_cost=3.0, step_cost=4.0)
        async with serving(executor=device.executor, depth=depth) as served:
            plain = served.scheduler.schedule

            def schedule(device: VirtualDevice = device, plain: Callable[[], Any] = plain) -> Any:
                step = plain()
                device.now += device.plan_cost if step is not None else 0.0
                return step

            served.scheduler.schedule = schedule  # type: ignore[method-assign]
            request = new_request(range(20), 50)
            served.mailbox.post_request(request)
            tokens[depth] = (await served.finish(request)).token_ids
            spent[depth] = device.now / 50
        assert output(request) == expected_tokens(request, TOKENS)
    assert tokens[1] == tokens[2]
    assert spent[1] == pytest.approx(7.0)
    assert 4.0 <= spent[2] < 4.2


class VirtualDevice:
    """Time passes when the host plans, and when it waits for a step that is not done yet."""

    def __init__(self, plan_cost: float, step_cost: float) -> None:
        self.now = self.free_at = 0.0
        self.plan_cost, self.step_cost = plan_cost, step_cost

    def executor(self, worker: FakeWorker) -> Any:
        device = self

        class Executor(FakeExecutor):
            def submit(self, plan: StepPlan) -> Any:
                device.free_at = done_at = max(device.free_at, device.now) + device.step_cost
                pending = super().submit(plan)

                class Pending:
                    async def wait(self) -> StepResult:
                        device.now = max(device.now, done_at)
                        return await pending.wait()

                return Pending()

        return Executor(worker)
