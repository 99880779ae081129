"""External KV beside the behaviour cases: requests that go away, stores that are slow or broken, and what is never saved."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from infer.engine.request import Request, Status
from infer.engine.step import StepPlan
from infer.plugins.kv_connector import ExternalMatch, KVReport
from kv_driver import ExternalDriver
from step_driver import PlannedFailure, cache_config, expected_tokens, full_group, output

PROMPT = list(range(60))


def stored(**options: Any) -> ExternalDriver:
    """A driver whose store has the three whole blocks of the prompt."""
    driver = ExternalDriver(**({"save": False} | options))
    driver.remember(PROMPT, 3)
    return driver


def assert_right(driver: ExternalDriver) -> None:
    driver.run()
    for request in driver.requests:
        if request.error is None and request.finish_reason not in ("abort", "deadline"):
            assert output(request) == expected_tokens(request, driver.next_token)
    driver.assert_nothing_left()


def test_others_run_while_a_load_is_on_its_way() -> None:
    driver = stored()
    driver.worker.release = lambda transfer: False
    slow, other = driver.add(PROMPT, 2), driver.add([1, 2, 3], 5)
    for _ in range(5):
        driver.step()
    assert other.status is Status.FINISHED and slow.status is Status.WAITING
    driver.worker.release = lambda transfer: True
    driver.step()
    driver.step()
    assert slow.num_cached_tokens == 48
    assert_right(driver)


@pytest.mark.row("KV-EXTERNAL-CACHE", "deferred free: blocks of an aborted load are held until it is over")
@pytest.mark.parametrize("how", ["abort", "deadline"])
def test_blocks_of_an_aborted_load_are_held_until_it_is_over(how: Any) -> None:
    driver = stored()
    driver.worker.release = lambda transfer: False
    request = driver.add(PROMPT, 2)
    driver.step()
    driver.scheduler.finish(request, how)
    assert driver.kv.pools[0].num_in_use == 3
    for _ in range(3):
        assert driver.step() is not None  # idle steps ask for the report
    assert driver.kv.pools[0].num_in_use == 3
    driver.worker.release = lambda transfer: True
    driver.step()
    assert driver.kv.pools[0].num_in_use == 0
    follower = driver.add(PROMPT, 2)  # and what came is in the prefix cache
    driver.step()
    assert follower.num_cached_tokens == 48
    assert_right(driver)


def test_a_load_that_takes_too_long_is_given_up_and_its_blocks_stay_out_of_use() -> None:
    driver = stored(timeout=5.0)
    driver.worker.release = lambda transfer: False
    request = driver.add(PROMPT, 2)
    driver.step()
    driver.now = 6.0
    driver.step()
    assert request.status is not Status.WAITING and request.num_cached_tokens == 0
    assert not set(request.blocks.tables[0]) & {block.block_id for block in driver.worker.started[0].blocks}
    assert driver.external.stats.load_failures == 1
    driver.worker.release = lambda transfer: True
    assert_right(driver)


def test_a_lookup_that_takes_too_long_is_a_miss() -> None:
    driver = stored(timeout=5.0)
    driver.connector.script = lambda request_id, asked: ExternalMatch("later")
    request = driver.add(PROMPT, 2)
    driver.step()
    assert request.status is Status.WAITING
    driver.now = 6.0
    driver.step()
    assert request.num_cached_tokens == 0 and driver.connector.forgotten[0] == "0"
    assert driver.external.stats.lookup_failures == 1
    driver.connector.script = lambda request_id, asked: None
    assert_right(driver)


def test_a_request_that_is_preempted_in_a_step_that_waited_in_vain_delivers_nothing_of_it() -> None:
    driver = stored(cache=cache_config(full_group(8)), policy="priority", reserve_full_prompt=False)
    driver.connector.wait = True
    driver.worker.failing = lambda transfer: (0,)
    loser = driver.add(PROMPT, 8, priority=5)
    driver.schedule()
    winner = driver.add([7] * 40, 60, priority=0)
    driver.schedule()
    driver.schedule()
    while driver.in_flight:
        driver.apply()
        driver.schedule()
    assert_right(driver)
    assert loser.num_preemptions and winner.finish_reason == "length"


def test_steps_in_flight_may_fail_with_transfers_on_their_way() -> None:
    driver = stored(save=True)
    driver.worker.release = lambda transfer: len(driver.worker.plans) > 8
    lost = driver.add([9] * 40, 20)
    driver.add(PROMPT, 4)
    driver.schedule()
    driver.worker.fail_at = _fail
    driver.schedule()
    driver.worker.fail_at = lambda plan: None
    driver.apply()
    driver.apply()
    assert lost.finish_reason == "error"
    assert all(len(item.blocks) == 0 for item in driver.external._saves._unconfirmed)
    assert_right(driver)


def _fail(plan: StepPlan) -> Exception:
    return PlannedFailure("planted")


def test_a_block_is_saved_only_after_its_step_has_come_back() -> None:
    driver = ExternalDriver()
    driver.add(PROMPT, 4)
    driver.schedule()
    second = driver.schedule()
    assert second is not None and (second.plan.kv is None or second.plan.kv.start == [])
    driver.apply()
    third = driver.schedule()
    assert third is not None and third.plan.kv is not None
    (transfer,) = third.plan.kv.start
    assert transfer.kind == "save" and [block.index for block in transfer.blocks] == [0, 1, 2]
    assert_right(driver)
    assert driver.external.stats.saved_blocks == 3


@pytest.mark.row("KV-EXTERNAL-CACHE", "deferred free: a block being saved outlives its request")
def test_a_block_being_saved_outlives_its_request() -> None:
    driver = ExternalDriver(cache_config(full_group(16)))
    driver.worker.release = lambda transfer: False
    request = driver.add(PROMPT, 4)
    driver.step()
    driver.step()
    driver.scheduler.finish(request, "abort")
    assert driver.kv.pools[0].num_in_use == 3
    for prompt in ([5] * 100, [6] * 100, [7] * 100):
        driver.add(prompt, 3)
    for _ in range(20):
        driver.step()
    driver.worker.release = lambda transfer: True  # the worker checks what it saves
    assert_right(driver)


def test_no_more_than_a_quarter_of_the_cache_is_held_for_saving() -> None:
    driver = ExternalDriver(cache_config(full_group(40)))
    driver.worker.release = lambda transfer: False
    driver.add(range(300), 3)
    driver.step()
    driver.step()
    assert sum(len(transfer.blocks) for transfer in driver.worker.started) == 10
    assert driver.external.stats.skipped_saves == 8
    driver.worker.release = lambda transfer: True
    assert_right(driver)


def test_other_weights_load_and_save_nothing() -> None:
    driver = stored(save=True)
    driver.scheduler.commit_version(1)
    request = driver.add(PROMPT, 2)
    driver.run()
    assert request.num_cached_tokens == 0 and driver.worker.started == [] and driver.connector.asked == {}
    assert_right(driver)


def test_what_is_on_its_way_when_weights_change_is_not_used() -> None:
    driver = stored(save=True)
    driver.worker.release = lambda transfer: len(driver.worker.plans) > 2
    request = driver.add(PROMPT, 2)
    driver.step()
    driver.scheduler.commit_version(1)
    driver.run()
    assert request.num_cached_tokens == 0 and len(driver.worker.started) == 1
    assert_right(driver)


def test_prompt_logprobs_and_salts() -> None:
    driver = stored()
    for options in ({"prompt_logprobs": 0}, {"salt": "mine"}):
        assert (request := driver.add(PROMPT, 2, **options))
        driver.run()
        assert request.num_cached_tokens == 0
    assert driver.worker.started == []
    assert_right(driver)


def test_choices_share_what_was_loaded() -> None:
    for wait in (False, True):
        driver = stored()
        driver.connector.wait = wait
        first = driver.add(PROMPT, 4)
        second = driver.add(PROMPT, 4, seed=8)
        driver.scheduler.waiting.discard(second)
        second.choice_index, first.siblings = 1, (second,)
        driver.run()
        assert (first.num_cached_tokens, second.finish_reason) == (48, "length")
        assert_right(driver)


def raising(request_id: str, asked: int) -> ExternalMatch:
    raise OSError("no route")


@pytest.mark.parametrize(
    "answer",
    [raising, lambda r, n: ExternalMatch("hit", 61), lambda r, n: ExternalMatch("hit", -1), lambda r, n: "yes"],
    ids=["raises", "too-much", "negative", "nonsense"],
)
def test_a_connector_that_fails_is_a_miss_and_one_warning(
    answer: Callable[[str, int], Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    driver = stored()
    driver.connector.script = answer
    requests: list[Request] = [driver.add(PROMPT, 2), driver.add(PROMPT[1:], 2)]
    driver.run()
    assert [request.num_cached_tokens for request in requests] == [0, 0]
    assert sum("KV store failed in a lookup" in record.message for record in caplog.records) == 1
    driver.connector.script = lambda request_id, asked: None
    driver.remember([3, *PROMPT], 3)
    assert (request := driver.add([3, *PROMPT], 2))
    driver.run()
    assert request.num_cached_tokens == 48
    assert [r.message for r in caplog.records if "works again" in r.message] == ["the external KV store works again"]
    assert_right(driver)


def test_reports_of_transfers_that_nobody_ordered_are_counted() -> None:
    driver = stored()
    driver.add(PROMPT, 2)
    step = driver.schedule()
    assert step is not None
    _, result = driver.in_flight[0]
    assert not isinstance(result, Exception)
    result.kv_reports += [KVReport(77), KVReport(1), KVReport(1)]
    driver.apply()
    assert driver.external.stats.unknown_reports >= 2
    assert_right(driver)


def test_a_load_does_not_build_on_blocks_of_a_step_that_failed() -> None:
    """The first block is computed by a step in flight, the others are loaded behind it; then that step fails."""
    driver = stored()
    driver.worker.release = lambda transfer: len(driver.worker.plans) > 4
    computing = driver.add(PROMPT[:20], 4)
    driver.connector.script = lambda request_id, asked: ExternalMatch("miss") if request_id == "0" else None
    driver.worker.fail_at = _fail
    driver.schedule()
    driver.worker.fail_at = lambda plan: None
    loading = driver.add(PROMPT, 4)
    driver.schedule()
    assert driver.external._loads[loading].hit.tables[0][0] == computing.blocks.tables[0][0]
    driver.apply()
    assert computing.finish_reason == "error"
    driver.connector.script = lambda request_id, asked: None
    assert_right(driver)
    assert output(loading) == expected_tokens(loading, driver.next_token)


def test_nothing_of_a_request_whose_row_failed_is_saved_or_found() -> None:
    driver = ExternalDriver()
    driver.worker.row_error = lambda ids: "logits hold NaN" if len(ids) == 60 else None
    request = driver.add(PROMPT, 4)
    driver.schedule()
    assert driver.kv.pools[0].ref_count(request.blocks.tables[0][0]) == 2
    driver.apply()
    assert request.finish_reason == "error" and driver.kv.pools[0].num_in_use == 0
    assert [driver.kv.pools[0].find(block_hash) for block_hash in driver.kv.hashes(request, 3)] == [None] * 3
    driver.worker.row_error = lambda ids: None
    driver.run()
    assert driver.worker.store == {}
    driver.assert_nothing_left()


@pytest.mark.parametrize(
    ("loaded", "token", "cause"),
    [(20, 25, "other token"), (25, 25, "other token"), (26, 26, "never computed")],
    ids=["before", "at", "behind"],
)
def test_a_hit_that_ends_inside_a_block_is_explained_from_the_blocks_beginning(
    loaded: int, token: int, cause: str
) -> None:
    """The cache has another second block, which agrees up to token 25; the prompt ends before the third."""
    driver, other = ExternalDriver(save=False), ExternalDriver()
    donor = other.add(list(range(35)), 2)
    other.step()
    content = [other.worker._kv[0, donor.blocks.tables[0][1], offset] for offset in range(loaded - 16)]
    driver.add([*range(25), *range(900, 910)], 2)
    driver.run()
    driver.worker.handed_over["1", 1] = content + [b""] * (32 - loaded)
    driver.connector.script = lambda request_id, asked: ExternalMatch("hit", loaded)
    request = driver.add(list(range(35)), 2)
    assert_right(driver)
    [admission] = request.history.admissions
    assert admission.num_cached == loaded
    end = admission.prefix
    assert (end.cause, end.token, end.cached_id) == (cause, token, 900 if cause == "other token" else None)
