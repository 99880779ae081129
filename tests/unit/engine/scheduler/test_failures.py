"""Steps that fail: who ends, who survives with right tokens, and that no block keeps content that was never computed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from infer.engine.request import Request, Status
from infer.engine.step import StepPlan
from infer.errors import StepError
from step_driver import PlannedFailure, StepDriver, cache_config, expected_tokens, fetch, full_group, output


def fail_steps(driver: StepDriver, *step_ids: int) -> None:
    driver.worker.fail_at = lambda plan: PlannedFailure("out of memory") if plan.step_id in step_ids else None


def assert_survivors_are_right(driver: StepDriver) -> None:
    for request in driver.requests:
        if request.finish_reason in ("error", "abort"):
            assert output(request) == expected_tokens(request, driver.next_token)[: len(output(request))]
        else:
            assert output(request) == expected_tokens(request, driver.next_token)


def test_requests_of_a_failed_step_end_with_the_cause_and_the_engine_goes_on() -> None:
    driver = StepDriver()
    fail_steps(driver, 2)
    first = driver.add([1, *range(20)], 10)
    driver.run()
    assert first.finish_reason == "error"
    assert isinstance(first.error, StepError)
    assert str(first.error) == "step 2 failed: PlannedFailure: out of memory"
    assert isinstance(first.error.__cause__, PlannedFailure)
    (update,) = fetch(first)
    assert (len(update.token_ids), update.finish_reason, update.error) == (2, "error", first.error)
    second = driver.add([1, *range(20)], 10)
    driver.run()
    assert output(second) == expected_tokens(second, driver.next_token)
    driver.assert_nothing_left()


def test_a_waiting_request_survives_the_failure_of_others() -> None:
    driver = StepDriver(max_num_seqs=1)
    fail_steps(driver, 0)
    first, second = driver.add([1] * 20, 5), driver.add([2] * 20, 5)
    driver.run()
    assert (first.finish_reason, second.finish_reason) == ("error", "length")
    assert_survivors_are_right(driver)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_a_hit_on_blocks_of_a_failed_step_is_computed_again(depth: int) -> None:
    """The second request shares the first one's prompt while the step that computes it is in flight, and fails."""
    driver = StepDriver(max_num_batched_tokens=100)
    fail_steps(driver, 0)
    driver.add(range(100), 5)
    driver.schedule()
    late = driver.add(range(100), 5)
    while len(driver.in_flight) < depth and driver.schedule() is not None:
        pass
    driver.run(depth)
    assert driver.requests[0].finish_reason == "error"
    assert late.finish_reason == "length"
    assert_survivors_are_right(driver)
    driver.assert_nothing_left()


def test_blocks_registered_by_an_ended_request_do_not_outlive_the_failure_of_their_step() -> None:
    """The request stops at its 16th output; the step in flight behind it would have computed the block's last position."""
    driver = StepDriver()
    first = driver.add(range(17), 40, stop_ids={})
    while len(output(first)) < 14:
        driver.step(2)
    stop = expected_tokens(first, driver.next_token)[14]
    first.stop_ids[stop] = stop
    failing = driver.in_flight[-1][0].plan.step_id + 1 if driver.in_flight else 0
    fail_steps(driver, failing)
    driver.run(2)
    assert first.finish_reason == "stop"
    assert len(first.token_ids) == 32
    assert driver.in_flight == driver.scheduler._in_flight
    second = driver.add([*first.token_ids, 5, 6, 7], 4)
    fail_steps(driver)
    driver.run(2)
    assert output(second) == expected_tokens(second, driver.next_token)
    assert second.num_cached_tokens == 16


@pytest.mark.parametrize("depth", [3, 4, 5])
def test_a_preempted_request_does_not_keep_a_token_drawn_from_a_failed_step(depth: int) -> None:
    """In flight: the step that fails, then one that built on it; then the request is preempted, and only then it fails."""
    driver = StepDriver(cache_config(full_group(5), block_size=4), max_num_batched_tokens=64)
    first = driver.add([1, 2, 3, 4, 5, 6, 7], 9)
    second = driver.add([9, 2, 3, 4, 5, 6, 7], 9)
    fail_steps(driver, 1)
    driver.run(depth)
    assert second.num_preemptions > 0
    assert first.finish_reason == second.finish_reason == "error"
    assert_survivors_are_right(driver)
    driver.assert_nothing_left()


def _abort_first(driver: StepDriver) -> None:
    driver.scheduler.finish(driver.requests[0], "abort")


def _restart(driver: StepDriver) -> None:
    driver.scheduler.reset_prefix_cache(restart_running=True)


@pytest.mark.parametrize("event", [_abort_first, _restart])
@pytest.mark.parametrize("depth", [2, 3])
def test_a_failure_after_an_abort_or_a_restart(depth: int, event: Callable[[StepDriver], None]) -> None:
    driver = StepDriver(max_num_batched_tokens=30)
    fail_steps(driver, 3)
    driver.add([1, *range(40)], 10)
    driver.add([1, *range(40)], 10)
    for _ in range(2):
        driver.step(depth)
    while len(driver.in_flight) < depth and driver.schedule() is not None:
        pass
    event(driver)
    driver.run(depth)
    assert_survivors_are_right(driver)
    driver.assert_nothing_left()


def test_every_step_failing_ends_every_request_once() -> None:
    driver = StepDriver(max_num_seqs=2)
    driver.worker.fail_at = every_plan
    for index in range(5):
        driver.add([index] * 20, 5)
    driver.run(2)
    ends = [update for request in driver.requests for update in fetch(request)]
    assert [update.finish_reason for update in ends] == ["error"] * 5
    driver.worker.fail_at = lambda plan: None
    driver.assert_nothing_left()


def every_plan(plan: StepPlan) -> Exception:
    return PlannedFailure("broken")


def test_finishing_twice_changes_nothing() -> None:
    driver = StepDriver()
    request: Request = driver.add(range(20), 1)
    driver.run()
    driver.scheduler.finish(request, "abort")
    assert (request.status, request.finish_reason) == (Status.FINISHED, "length")
    assert driver.scheduler.stats.finished == 1
