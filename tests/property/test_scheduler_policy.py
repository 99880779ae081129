"""Priority and FCFS as orders: admission, victims, and that equal priorities are FCFS. Against plain sorting."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.engine.request import Request
from infer.engine.scheduler.policy import WaitingQueue, victim
from step_driver import StepDriver, cache_config, expected_tokens, full_group, new_request, output

pytestmark = pytest.mark.row("ENG-PRIORITY-SCHED", "admission and victims follow the key (priority, arrival)")

priorities = st.lists(st.integers(-3, 3), min_size=1, max_size=12)


@given(wanted=priorities, seats=st.integers(1, 4))
def test_admission_is_sorting_by_priority_and_arrival(wanted: list[int], seats: int) -> None:
    driver = StepDriver(policy="priority", max_num_seqs=seats)
    for index, priority in enumerate(wanted):
        driver.add([index] * 5, 1, priority=priority)
    order: list[str] = []
    while (step := driver.schedule()) is not None:
        order += [request.request_id for request in step.requests]
        driver.apply()
    assert order == [str(index) for index in sorted(range(len(wanted)), key=lambda index: (wanted[index], index))]


@given(wanted=priorities, data=st.data())
def test_the_queue_is_a_sorted_list_whatever_comes_and_goes(wanted: list[int], data: st.DataObject) -> None:
    queue, model = WaitingQueue("priority"), list[Request]()
    for arrival, priority in enumerate(wanted):
        request = new_request([1], priority=priority, arrival=arrival)
        queue.push(request)
        model.append(request)
        if data.draw(st.booleans()):
            leaver = data.draw(st.sampled_from(model))
            queue.discard(leaver)
            queue.discard(leaver)
            model.remove(leaver)
        model.sort(key=lambda item: (item.priority, item.arrival))
        assert list(queue) == model and len(queue) == len(model)
        assert [queue[index] for index in range(len(queue))] == model


@given(wanted=priorities, prefilling=st.lists(st.booleans(), min_size=12, max_size=12), spare=st.booleans())
def test_the_victim_is_the_largest_key_and_prefills_are_spared_if_asked(
    wanted: list[int], prefilling: list[bool], spare: bool
) -> None:
    queue, requests = WaitingQueue("priority"), list[Request]()
    for arrival, (priority, is_prefilling) in enumerate(zip(wanted, prefilling, strict=False)):
        request = new_request([1, 2, 3], priority=priority, arrival=arrival)
        request.num_computed = 1 if is_prefilling else 3
        queue.push(request)
        requests.append(request)
    candidates = [request for request in requests if not request.is_prefilling] if spare else requests
    expected = max(candidates or requests, key=lambda request: (request.priority, request.arrival))
    assert victim(requests, spare_prefilling=spare) is expected


@given(
    lengths=st.lists(st.integers(1, 60), min_size=2, max_size=8), blocks=st.integers(9, 16), priority=st.integers(-5, 5)
)
def test_equal_priorities_give_the_trace_of_fcfs(lengths: list[int], blocks: int, priority: int) -> None:
    plans = []
    for policy in ("fcfs", "priority"):
        driver = StepDriver(cache_config(full_group(blocks)), policy=policy, max_num_batched_tokens=32)
        for index, length in enumerate(lengths):
            driver.add([index] * length, 30, priority=priority)
        driver.run(2)
        assert [output(r) for r in driver.requests] == [expected_tokens(r, driver.next_token) for r in driver.requests]
        plans.append(driver.worker.plans)
    assert plans[0] == plans[1]


@given(wanted=priorities, blocks=st.integers(6, 12))
def test_under_pressure_every_victim_was_the_largest_key_running(wanted: list[int], blocks: int) -> None:
    driver = StepDriver(cache_config(full_group(blocks)), policy="priority", max_num_batched_tokens=40)
    for index, priority in enumerate(wanted):
        driver.add([index] * 20, 40, priority=priority)
    preempt = driver.scheduler._preempt

    def checked(loser: Request, *why: Any) -> None:
        assert loser is max(driver.scheduler.running, key=lambda request: (request.priority, request.arrival))
        preempt(loser, *why)

    driver.scheduler._preempt = checked  # type: ignore[method-assign]
    driver.run()
    assert [output(r) for r in driver.requests] == [expected_tokens(r, driver.next_token) for r in driver.requests]
