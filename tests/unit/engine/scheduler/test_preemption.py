"""Running out of blocks: behaviour cases 7, 10, 20, 21 and 24, recompute after preemption, reserved prompts."""

from __future__ import annotations

import pytest

from infer.engine.request import Request, Status
from step_driver import StepDriver, cache_config, expected_tokens, fetch, full_group, output


def test_case_07_late_output_of_a_preempted_request_is_recorded_once() -> None:
    driver = StepDriver(cache_config(full_group(10)), next_token=lambda ids, sampling: 42)
    first, second = driver.add([1, *range(79)], 8), driver.add([2, *range(79)], 8)
    driver.schedule()
    driver.schedule()
    assert second.status is Status.WAITING and second.num_pending == 1
    assert first.status is Status.RUNNING
    driver.apply()
    assert output(second) == [42]
    driver.run(2)
    assert output(first) == output(second) == [42] * 8
    assert [update.token_ids for update in fetch(second)] == [[42] * 8]
    assert driver.scheduler.stats.preemptions == second.num_preemptions == 1
    driver.assert_nothing_left()


@pytest.mark.row("ENG-PRIORITY-SCHED", "the victim is the maximum of (priority, arrival)")
def test_case_10_the_low_priority_request_loses_even_if_it_came_first() -> None:
    driver = StepDriver(cache_config(full_group(5)), policy="priority")
    low = driver.add([1] * 32, 8, priority=5)
    driver.step()
    high = driver.add([2] * 30, 8, priority=0)
    driver.step()
    assert low.status is high.status is Status.RUNNING
    while low.status is Status.RUNNING:
        assert driver.step() is not None
    assert high.status is Status.RUNNING
    driver.run()
    assert (low.num_preemptions, high.num_preemptions) == (1, 0)
    assert output(low) == expected_tokens(low, driver.next_token)


def test_case_10_nobody_is_preempted_when_space_suffices() -> None:
    driver = StepDriver(cache_config(full_group(6)), policy="priority")
    driver.add([1] * 32, 8, priority=5)
    driver.add([2] * 30, 8, priority=0)
    driver.run()
    assert driver.scheduler.stats.preemptions == 0


@pytest.mark.row("ENG-PREEMPT-RECOMPUTE", "tokens equal the uncapped run; counter matches the trace; free equals total")
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
def test_at_least_three_preemptions_change_no_token(depth: int, prefix_caching: bool) -> None:
    outputs = {}
    for name, blocks in (("capped", 14), ("uncapped", 1000)):
        cache = cache_config(full_group(blocks), prefix_caching=prefix_caching)
        driver = StepDriver(cache, max_num_batched_tokens=48)
        for index in range(6):
            driver.add([index, *range(30)], 60)
        losses = 0
        while True:
            before = [request.num_preemptions for request in driver.requests]
            if driver.step(depth) is None:
                break
            losses += sum(r.num_preemptions - old for r, old in zip(driver.requests, before, strict=True))
        assert losses == driver.scheduler.stats.preemptions
        assert (losses >= 3) == (name == "capped")
        outputs[name] = [output(request) for request in driver.requests]
        driver.assert_nothing_left()
    assert outputs["capped"] == outputs["uncapped"]


@pytest.mark.row("ENG-ASYNC-SCHED", "preemption with output in flight: every token once, in sampled order")
@pytest.mark.parametrize("depth", [2, 4])
def test_case_20_pressure_with_output_in_flight_loses_and_doubles_nothing(depth: int) -> None:
    driver = StepDriver(cache_config(full_group(9)), max_num_batched_tokens=64)
    preempted_in_flight = 0
    for step_number in range(500):
        if step_number % 2 == 0 and len(driver.requests) < 8:
            driver.add([len(driver.requests), *range(20)], 24)
        before = {request: request.num_preemptions for request in driver.requests}
        while len(driver.in_flight) < depth and driver.schedule() is not None:
            preempted_in_flight += sum(
                request.num_preemptions > before[request] and request.num_pending > 0 for request in driver.requests
            )
        if driver.in_flight:
            driver.apply()
    assert preempted_in_flight > 0, "the case needs a preemption while output is in flight"
    for request in driver.requests:
        (update,) = fetch(request)
        assert update.token_ids == output(request) == expected_tokens(request, driver.next_token)
        assert len(update.token_ids) == 24
    driver.assert_nothing_left()


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_case_21_reset_that_restarts_drops_what_is_in_flight(depth: int) -> None:
    driver = StepDriver(cache_config(full_group(9)), max_num_batched_tokens=64)
    dropped = 0
    for step_number in range(600):
        if step_number % 2 == 0 and len(driver.requests) < 8:
            driver.add([len(driver.requests), *range(20)], 24)
        if step_number % 5 == 3:
            running = list(driver.scheduler.running)
            in_flight = [request.num_pending for request in running]
            assert driver.scheduler.reset_prefix_cache(restart_running=True)
            dropped += sum(in_flight)
            assert all(request.num_pending == 0 and request.status is Status.WAITING for request in running)
            assert all(pool.find(h) is None for pool in driver.kv.pools for r in running for h in r.blocks.hashes)
        if driver.step(depth) is None and len(driver.requests) == 8:
            break
    assert dropped > 0 or depth == 1
    for request in driver.requests:
        (update,) = fetch(request)
        assert update.token_ids == expected_tokens(request, driver.next_token), "an ordered subset, nothing twice"
    driver.assert_nothing_left()


def test_case_24_nothing_is_left_after_a_workload() -> None:
    driver = StepDriver(cache_config(full_group(20)), max_num_batched_tokens=50, max_num_seqs=5)
    for index in range(20):
        driver.add([index, *range(index * 3)], 10)
    for _ in range(12):
        driver.step(2)
    for request in driver.requests[::3]:
        driver.scheduler.finish(request, "abort")
    driver.run(2)
    driver.assert_nothing_left()
    assert driver.scheduler._in_flight == driver.in_flight
    assert driver.kv.end_step() == []


@pytest.mark.row("ENG-SCHED-KNOBS", "with full-prompt reservation no request is preempted during prefill")
@pytest.mark.parametrize("reserve", [True, False])
def test_reserved_prompts_are_never_preempted_during_prefill(reserve: bool) -> None:
    driver = StepDriver(cache_config(full_group(16)), max_num_batched_tokens=24, reserve_full_prompt=reserve)
    for index in range(6):
        driver.add([index, *range(70)], 40)
    lost_in_prefill = 0
    known = dict.fromkeys(driver.requests, (0, False))
    while True:
        for request in driver.requests:
            known[request] = (request.num_preemptions, request.is_prefilling)
        if driver.step(2) is None:
            break
        lost_in_prefill += sum(
            request.num_preemptions > losses and prefilling and request.status is Status.WAITING
            for request, (losses, prefilling) in known.items()
        )
    assert driver.scheduler.stats.preemptions > 0
    assert (lost_in_prefill == 0) == reserve, "without reservation this load does preempt prefills"
    assert [output(r) for r in driver.requests] == [expected_tokens(r, driver.next_token) for r in driver.requests]


def test_a_preempted_request_returns_to_its_old_place() -> None:
    driver = StepDriver(cache_config(full_group(6)))
    first, second = driver.add([1] * 30, 40), driver.add([2] * 30, 40)
    driver.step()
    third = driver.add([3] * 30, 4)
    while second.status is Status.RUNNING:
        driver.step()
    order = list[Request](driver.scheduler.waiting)
    assert order == [second, third]
    driver.run()
    assert output(first) == expected_tokens(first, driver.next_token)
