"""What one step's result does to requests: behaviour cases 11 to 14, 18 and 19, and rows that fail alone."""

from __future__ import annotations

import pytest

from infer.errors import StepError
from step_driver import StepDriver, cache_config, expected_tokens, fetch, full_group, output

STOP = 42


def started(max_tokens: int = 16, stop_ids: dict[int, int | None] | None = None) -> StepDriver:
    driver = StepDriver()
    driver.add(range(20), max_tokens, stop_ids=stop_ids)
    driver.schedule()
    return driver


def test_case_11_eos_ends_the_request_and_stays_in_the_output() -> None:
    driver = started(stop_ids={STOP: None})
    request = driver.requests[0]
    driver.apply({request: [STOP]})
    assert (output(request), request.finish_reason, request.stop_reason) == ([STOP], "stop", None)
    assert driver.schedule() is None


def test_case_11_with_ignore_eos_it_goes_on() -> None:
    driver = started(stop_ids={})
    request = driver.requests[0]
    driver.apply({request: [STOP]})
    assert (output(request), request.finish_reason) == ([STOP], None)
    assert request in driver.scheduler.running


def test_case_12_tokens_after_the_stop_are_discarded() -> None:
    driver = started(stop_ids={STOP: STOP})
    request = driver.requests[0]
    driver.apply({request: [10, STOP, 12]})
    assert (output(request), request.finish_reason, request.stop_reason) == ([10, STOP], "stop", STOP)
    (update,) = fetch(request)
    assert (update.token_ids, update.finish_reason, update.stop_reason) == ([10, STOP], "stop", STOP)


def test_case_13_tokens_after_max_tokens_are_discarded() -> None:
    driver = started(max_tokens=2)
    request = driver.requests[0]
    driver.apply({request: [10, 11, 12]})
    assert (output(request), request.finish_reason) == ([10, 11], "length")


def test_case_14_a_stop_that_was_sampled_is_final_whatever_min_tokens_says() -> None:
    driver = StepDriver()
    request = driver.add(range(20), stop_ids={STOP: None}, min_tokens=5)
    driver.schedule()
    driver.apply({request: [10, 11, STOP]})
    assert (output(request), request.finish_reason) == ([10, 11, STOP], "stop")


@pytest.mark.row("ENG-ASYNC-SCHED", "prefill-chunk rows emit no token; nothing is scheduled past the last one")
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
def test_case_18_tokens_scheduled_are_prompt_plus_max_tokens_less_one(max_tokens: int, depth: int) -> None:
    driver = StepDriver(max_num_batched_tokens=8)
    request = driver.add(range(20), max_tokens)
    driver.run(depth)
    assert len(output(request)) == max_tokens
    assert driver.scheduler.stats.scheduled_tokens == 20 + max_tokens - 1
    assert driver.scheduler.stats.steps == 3 + max_tokens - 1


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_case_19_the_request_aborted_kth_has_k_outputs(depth: int) -> None:
    driver = StepDriver()
    for index in range(10):
        driver.add([index, 1, 2], 20)
    order = [0, 8, 3, 1, 6, 4, 2, 5, 7, 9]
    for victim in order:
        driver.step(depth)
        driver.scheduler.finish(driver.requests[victim], "abort")
    while driver.in_flight:
        driver.apply()
    assert [len(output(driver.requests[victim])) for victim in order] == list(range(1, 11))
    for victim in order:
        (update,) = fetch(driver.requests[victim])
        assert update.token_ids == output(driver.requests[victim])
        assert update.finish_reason == "abort"
    driver.assert_nothing_left()


@pytest.mark.row("X-POISON", "a row that fails ends alone, its companions finish with their solo tokens")
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_failed_row_ends_alone(depth: int) -> None:
    driver = StepDriver(cache_config(full_group(200)))
    poisoned, healthy = driver.add([1, *range(40)], 20), driver.add([2, *range(40)], 20)
    driver.worker.row_error = lambda ids: "logits hold NaN" if ids[0] == 1 and len(ids) == 45 else None
    driver.run(depth)
    assert poisoned.finish_reason == "error"
    assert isinstance(poisoned.error, StepError)
    assert str(poisoned.error) == "request '0': logits hold NaN"
    assert output(poisoned) == expected_tokens(poisoned, driver.next_token)[:4]
    assert output(healthy) == expected_tokens(healthy, driver.next_token)
    driver.worker.row_error = lambda ids: None
    again = driver.add([1, *range(40)], 20)
    driver.run(depth)
    assert again.num_cached_tokens == 0, "the failed row's blocks must not be findable"
    assert output(again) == expected_tokens(again, driver.next_token)
    driver.assert_nothing_left()


def test_prompt_logprobs_arrive_once_and_in_order_over_chunks_and_preemption() -> None:
    driver = StepDriver(cache_config(full_group(12)), max_num_batched_tokens=20)
    first = driver.add([7, *range(100, 149)], 60)
    second = driver.add([8, *range(200, 269)], 30, prompt_logprobs=0)
    driver.run()
    assert driver.scheduler.stats.preemptions > 0
    (update,) = fetch(second)
    assert [entry.token_id for entry in update.prompt_logprobs] == second.token_ids[1 : second.prompt_len]
    assert output(first) == expected_tokens(first, driver.next_token)
    assert output(second) == expected_tokens(second, driver.next_token)
