"""External KV: behaviour cases 39 to 45, driven through the scheduler; contents are checked by the fake worker."""

from __future__ import annotations

import pytest

from infer.engine.request import Request, Status
from infer.errors import KVLoadError
from infer.plugins.kv_connector import ExternalMatch
from kv_driver import ExternalDriver
from step_driver import cache_config, expected_tokens, full_group, output, sliding_group

SIZE = 16
LONG = list(range(100 * SIZE))


def assert_right(driver: ExternalDriver, *requests: Request) -> None:
    """Run out; the answers are those of an engine without a store, and nothing is left."""
    driver.run()
    for request in requests or driver.requests:
        assert output(request) == expected_tokens(request, driver.next_token)
    driver.assert_nothing_left()


@pytest.mark.row("KV-EXTERNAL-CACHE", "the third answer keeps the place and is counted once")
def test_case_39_a_lookup_that_takes_long_keeps_the_place_and_is_counted_once() -> None:
    driver = ExternalDriver(max_num_active_seqs=1, save=False)
    prompt = list(range(40))
    driver.remember(prompt, 2)
    driver.connector.script = lambda request_id, asked: ExternalMatch("later") if asked <= 3 else None
    first, second = driver.add(prompt, 2), driver.add([*prompt[:7], 9], 2)
    for asked in (1, 2, 3):
        step = driver.schedule()
        assert step is not None and step.requests == []
        assert driver.connector.asked == {"0": asked, "1": asked}
        driver.apply()
    driver.step()  # the first is loaded; the second may pass, and is admitted
    assert list(driver.scheduler.waiting) == [first] and driver.scheduler.running == [second]
    third = driver.add([5], 2)
    driver.step()
    while second.status is not Status.FINISHED:
        driver.step()
    assert driver.scheduler.waiting[0] is first
    step = driver.schedule()
    assert driver.counts(step) == {"0": 40 - 32}
    driver.apply()
    assert driver.scheduler.waiting[0] is third
    stats = driver.external.stats
    assert (stats.queries, stats.hits, stats.hit_tokens) == (2, 1, 32)
    assert driver.connector.asked["0"] == 4
    assert_right(driver, first, second, third)


def test_case_40_a_prompt_of_whole_blocks_computes_its_last_token_in_the_last_block() -> None:
    driver = ExternalDriver(save=False)
    prompt = list(range(2 * SIZE))
    driver.remember(prompt, 2)
    request = driver.add(prompt, 3)
    driver.step()
    assert [len(transfer.blocks) for transfer in driver.worker.started] == [2]
    step = driver.schedule()
    assert step is not None
    assert list(step.plan.starts) == [2 * SIZE - 1] and list(step.plan.counts) == [1]
    assert driver.held(request) == 2 and request.num_cached_tokens == 2 * SIZE - 1
    driver.apply()
    assert_right(driver)


def test_case_41_blocks_on_their_way_are_not_hit_by_an_identical_prompt() -> None:
    driver = ExternalDriver(save=False)
    prompt = list(range(41))
    other = ExternalDriver()
    donor = other.add(prompt, 2)
    other.step()
    content = [other.worker._kv[0, donor.blocks.tables[0][2], offset] for offset in range(SIZE // 2)]
    driver.remember(prompt, 2)
    driver.worker.handed_over["0", 2] = content + [b""] * (SIZE // 2)
    driver.worker.release = lambda transfer: False
    driver.connector.script = lambda request_id, asked: (
        ExternalMatch("hit", 40) if request_id == "0" else ExternalMatch("miss")
    )
    remote = driver.add(prompt, 3)
    driver.step()
    (load,) = driver.worker.pending.values()
    assert [block.index for block in load.blocks] == [0, 1, 2] and load.blocks[2].hash == b""
    local = driver.add(prompt, 3)
    step = driver.schedule()
    assert driver.counts(step) == {"1": 41} and local.num_cached_tokens == 0
    hashes = driver.kv.hashes(local, 2)
    assert [driver.kv.pools[0].find(block_hash) for block_hash in hashes] == local.blocks.tables[0][:2]
    driver.apply()
    driver.worker.release = lambda transfer: True
    driver.step()
    step = driver.schedule()
    assert step is not None and driver.counts(step)["0"] == 1
    assert remote.num_cached_tokens == 40 and remote.blocks.tables[0][:3] == [block.block_id for block in load.blocks]
    driver.apply()
    assert_right(driver)


def test_case_42_a_load_without_room_is_not_started_until_there_is() -> None:
    driver = ExternalDriver(cache_config(full_group(5)), save=False)
    prompt = list(range(100, 100 + 3 * SIZE + 1))
    driver.remember(prompt, 3)
    local = driver.add(range(2 * SIZE + 1), 4)
    driver.step()
    assert driver.held(local) == 3
    remote = driver.add(prompt, 3)
    while local.status is not Status.FINISHED:
        assert driver.worker.started == []
        driver.step()
    driver.step()
    assert [len(transfer.blocks) for transfer in driver.worker.started] == [3]
    driver.step()
    assert remote.num_cached_tokens == 3 * SIZE
    assert_right(driver)


def test_blocks_that_went_while_a_load_found_no_room_are_asked_for() -> None:
    """Found by the combinations: the answer was kept that the store had given beside blocks of the engine's own, and those were
    ordered from the store, which never had them."""
    driver = ExternalDriver(cache_config(full_group(5)), save=False)
    prompt = list(range(100, 100 + 3 * SIZE + 1))
    driver.remember(prompt, 3)
    driver.add(prompt[: 2 * SIZE + 1], 2)
    driver.run()
    for key in list(driver.worker.store)[:2]:
        del driver.worker.store[key]
    hog = driver.add(range(2 * SIZE + 8), 2 * SIZE)
    driver.step()
    remote = driver.add(prompt, 3)
    beside = ExternalMatch("hit", 3 * SIZE)
    driver.connector.script = lambda name, asked: beside if (name, asked) == (remote.request_id, 1) else None
    while hog.status is not Status.FINISHED:
        driver.step()
        assert not [transfer for transfer in driver.worker.started if transfer.request_id == remote.request_id]
    assert_right(driver)
    assert driver.connector.asked[remote.request_id] == 2
    assert driver.external.stats.load_failures == 0 and remote.num_cached_tokens == 0


@pytest.mark.parametrize(("failing", "blocks"), [((50, 98), 50), ((0, 98), 0), ((), 99)])
@pytest.mark.parametrize("depth", [1, 2])
def test_case_43_a_failed_load_computes_from_its_first_bad_block_on(
    failing: tuple[int, ...], blocks: int, depth: int
) -> None:
    driver = ExternalDriver(max_num_batched_tokens=4096, save=False)
    others = [[7, *LONG], [8, *LONG]]
    for prompt in (LONG, *others):
        driver.remember(prompt, 99)
    driver.worker.failing = lambda transfer: failing if transfer.request_id == "1" else ()
    requests = [driver.add(prompt, 3) for prompt in (others[0], LONG, others[1])]
    driver.run(depth)
    assert [len(transfer.blocks) for transfer in driver.worker.started] == [99] * 3
    cached = [request.num_cached_tokens for request in requests]
    assert cached == [99 * SIZE, blocks * SIZE, 99 * SIZE]
    assert driver.external.stats.load_failures == bool(failing)
    assert_right(driver)


@pytest.mark.parametrize(("failing", "blocks"), [((50, 98), 50), ((0, 98), 0)])
def test_case_44_the_same_in_a_step_that_waits_for_it(failing: tuple[int, ...], blocks: int) -> None:
    driver = ExternalDriver(max_num_batched_tokens=4096, save=False)
    driver.connector.wait = True
    others = [[7, *LONG], [8, *LONG]]
    for prompt in (LONG, *others):
        driver.remember(prompt, 99)
    driver.worker.failing = lambda transfer: failing if transfer.request_id == "1" else ()
    healthy, failed, well = (driver.add(prompt, 1) for prompt in (others[0], LONG, others[1]))
    step = driver.schedule()
    assert driver.counts(step) == {"0": 17, "1": 16, "2": 17}
    driver.apply()
    assert (healthy.finish_reason, well.finish_reason) == ("length", "length")
    assert failed.status is Status.WAITING and output(failed) == []
    step = driver.schedule()
    assert step is not None and list(step.plan.starts) == [blocks * SIZE]
    driver.apply()
    assert_right(driver)


@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("depth", [1, 3])
def test_case_45_what_a_failed_load_means_is_a_setting(wait: bool, depth: int) -> None:
    prompt = list(range(60))
    for fail_requests in (True, False):
        driver = ExternalDriver(fail_requests=fail_requests, save=False)
        driver.connector.wait = wait
        driver.remember(prompt, 3)
        driver.worker.failing = lambda transfer: (0,)
        request = driver.add(prompt, 4)
        driver.run(depth)
        if fail_requests:
            assert request.finish_reason == "error" and isinstance(request.error, KVLoadError)
            assert "1 of 3 blocks" in str(request.error) and output(request) == []
        else:
            assert output(request) == expected_tokens(request, driver.next_token)
            assert 0 in [plan.starts[0] for plan in driver.worker.plans if len(plan.slots)]
        assert driver.external.stats.load_failures == 1
        driver.assert_nothing_left()


@pytest.mark.row("KV-EXTERNAL-CACHE", "multi-group models: what a window reaches is loaded")
def test_groups_with_a_window_load_what_the_window_reaches() -> None:
    """120 tokens, window 40: the last token of a load sees positions 73 on, which begin in block 4."""
    driver = ExternalDriver(cache_config(full_group(100), sliding_group(100, 40)), save=False)
    prompt = list(range(120))
    driver.remember(prompt, 7)
    request = driver.add(prompt, 4)
    driver.step()
    (load,) = driver.worker.started
    assert [block.index for block in load.blocks if block.group == 0] == list(range(7))
    assert [block.index for block in load.blocks if block.group == 1] == [4, 5, 6]
    driver.step()
    assert request.num_cached_tokens == 112
    assert_right(driver)


def test_a_failed_block_of_a_window_shortens_the_hit_to_where_the_window_is_whole() -> None:
    driver = ExternalDriver(cache_config(full_group(100), sliding_group(100, 40)), save=False)
    prompt = list(range(120))
    driver.remember(prompt, 7)
    driver.worker.failing = lambda transfer: [i for i, b in enumerate(transfer.blocks) if (b.group, b.index) == (1, 6)]
    request = driver.add(prompt, 4)
    driver.step()
    driver.step()
    assert request.num_cached_tokens == 0  # block 3 of the window was not loaded
    assert_right(driver)
