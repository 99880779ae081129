"""Who is scheduled, with how many tokens, in which order: behaviour cases 1 to 6, 8 and 9, and the partial-prefill limits."""

from __future__ import annotations

import pytest

from step_driver import StepDriver, cache_config, expected_tokens, full_group, output


def prompt(length: int, start: int = 0) -> list[int]:
    """Different prompts share nothing when their starts differ."""
    return [start, *range(1, length)]


def test_case_01_requests_that_fit_are_admitted_in_arrival_order_with_full_prompts() -> None:
    driver = StepDriver()
    for index in range(10):
        driver.add(prompt(20 + index, index))
    counts = driver.counts(driver.schedule())
    assert list(counts.items()) == [(str(index), 20 + index) for index in range(10)]
    assert not driver.scheduler.waiting


def test_case_02_active_cap_holds_admission_below_the_execution_cap() -> None:
    driver = StepDriver(max_num_seqs=16, max_num_active_seqs=3)
    for index in range(10):
        driver.add(prompt(20, index))
    driver.schedule()
    assert (len(driver.scheduler.running), len(driver.scheduler.waiting)) == (3, 7)
    assert driver.scheduler.config.max_num_seqs == 16


def test_case_03_three_long_prompts_progress_together_under_the_threshold() -> None:
    driver = StepDriver(max_num_batched_tokens=1024, long_prefill_threshold=400)
    for index in range(3):
        driver.add(prompt(800, index))
    seen = []
    for _ in range(3):
        seen.append(list(driver.counts(driver.schedule()).values()))
        driver.apply()
    assert seen == [[400, 400, 224], [400, 400, 224], [1, 1, 352]]


def test_case_04_threshold_is_ignored_when_the_request_is_alone() -> None:
    driver = StepDriver(max_num_batched_tokens=1024, long_prefill_threshold=400)
    driver.add(prompt(2000))
    assert driver.counts(driver.schedule()) == {"0": 1024}


def test_case_05_threshold_applies_with_another_request() -> None:
    driver = StepDriver(max_num_batched_tokens=1024, long_prefill_threshold=400)
    driver.add(prompt(2000))
    driver.add(prompt(10, 1))
    assert driver.counts(driver.schedule()) == {"0": 400, "1": 10}


@pytest.mark.parametrize(("chunked", "admitted"), [(True, {"0": 800, "1": 224}), (False, {"0": 800})])
def test_case_06_nobody_jumps_the_queue(chunked: bool, admitted: dict[str, int]) -> None:
    driver = StepDriver(max_num_batched_tokens=1024, max_num_seqs=3, chunked_prefill=chunked)
    for index, length in enumerate((800, 800, 10, 10)):
        driver.add(prompt(length, index))
    assert driver.counts(driver.schedule()) == admitted


@pytest.mark.row("ENG-PRIORITY-SCHED", "admission order equals sort by (priority, arrival)")
def test_case_08_lower_priority_number_first() -> None:
    driver = StepDriver(policy="priority")
    for index, priority in enumerate((2, 0, 1)):
        driver.add(prompt(20, index), priority=priority)
    assert list(driver.counts(driver.schedule())) == ["1", "2", "0"]


@pytest.mark.row("ENG-PRIORITY-SCHED", "admission order equals sort by (priority, arrival)")
def test_case_09_equal_priorities_go_by_arrival() -> None:
    driver = StepDriver(policy="priority")
    for index, (priority, arrival) in enumerate(zip((2, 1, 1, 0), (1, 3, 2, 4), strict=True)):
        driver.add(prompt(20, index), priority=priority, arrival=arrival, name=str(index))
    assert list(driver.counts(driver.schedule())) == ["3", "2", "1", "0"]


@pytest.mark.row("ENG-CHUNKED-PREFILL", "another request's decode appears between two chunks in the trace")
def test_a_decode_runs_between_the_chunks_of_a_long_prompt() -> None:
    driver = StepDriver(max_num_batched_tokens=37)
    driver.add(prompt(5), 30)
    driver.step()
    driver.add(prompt(300, 1), 4)
    trace = [driver.counts(driver.schedule())]
    driver.apply()
    while "1" in trace[-1] and trace[-1]["1"] > 1:
        trace.append(driver.counts(driver.schedule()))
        driver.apply()
    chunks = [step["1"] for step in trace]
    assert chunks == [36] * 8 + [12, 1]
    assert all(step["0"] == 1 for step in trace)


@pytest.mark.row(
    "ENG-PARTIAL-PREFILL", "with limits 2 and 1 no trace step breaks them, a short prompt starts in two steps"
)
def test_short_prompt_passes_long_ones_and_the_limits_hold() -> None:
    limits = {"long_prefill_threshold": 50, "max_num_batched_tokens": 100}
    tokens = {}
    for name, extra in (("limited", {"max_num_partial_prefills": 2, "max_long_partial_prefills": 1}), ("free", {})):
        driver = StepDriver(**limits, **extra)
        for index in range(3):
            driver.add(prompt(300, index), 5)
        short = driver.add(prompt(20, 9), 5)
        for step_number in range(200):
            step = driver.schedule()
            if step is None:
                break
            if name == "limited":
                partial = [r for r in driver.scheduler.running if r.num_computed < r.prompt_len]
                assert len(partial) <= 2
                assert sum(r.prompt_len > 50 for r in partial) <= 1
            if step_number == 1:
                assert short.num_computed > 0 or name == "free"
            driver.apply()
        tokens[name] = [output(request) for request in driver.requests]
        assert tokens[name] == [expected_tokens(request, driver.next_token) for request in driver.requests]
    assert tokens["limited"] == tokens["free"]


def test_partial_prefill_limit_lets_a_whole_prompt_in_but_not_a_second_partial_one() -> None:
    driver = StepDriver(max_num_batched_tokens=100, max_num_partial_prefills=1, long_prefill_threshold=40)
    driver.add(prompt(300), 1)
    driver.add(prompt(300, 1), 1)
    assert driver.counts(driver.schedule()) == {"0": 40}, "the second prompt would be half computed too"


@pytest.mark.row("ENG-SCHED-CORE", "the step trace never exceeds budget or max sequences, running before waiting")
@pytest.mark.parametrize("depth", [1, 2])
def test_sixteen_mixed_lengths_share_a_small_budget(depth: int) -> None:
    driver = StepDriver(cache_config(full_group(400)), max_num_batched_tokens=64, max_num_seqs=6)
    for index in range(16):
        driver.add(prompt(3 + 17 * index, index), 32)
    while True:
        running_before = {request.request_id for request in driver.scheduler.running}
        step = driver.schedule()
        if step is not None:
            assert step.plan.num_tokens <= 64
            assert len(driver.scheduler.running) <= 6
            was_running = [request.request_id in running_before for request in step.requests]
            assert was_running == sorted(was_running, reverse=True), "a waiting request came before a running one"
        if len(driver.in_flight) == depth or step is None:
            if not driver.in_flight:
                break
            driver.apply()
    assert [output(r) for r in driver.requests] == [expected_tokens(r, driver.next_token) for r in driver.requests]
    driver.assert_nothing_left()


def test_an_unused_rest_of_the_budget_is_counted_as_such() -> None:
    driver = StepDriver(max_num_batched_tokens=64)
    driver.add(prompt(10), 2)
    driver.run()
    assert (driver.scheduler.stats.steps, driver.scheduler.stats.scheduled_tokens) == (2, 11)
