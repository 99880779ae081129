"""Prefix cache: behaviour cases 27 to 33, 36 and 38, driven through the scheduler; blocks are checked by the fake worker."""

from __future__ import annotations

import pytest

from step_driver import StepDriver, cache_config, expected_tokens, full_group, output, sliding_group

COMMON = list(range(48))


def test_case_27_shared_blocks_have_two_owners_and_one_block_is_new() -> None:
    driver = StepDriver()
    first = driver.add([*COMMON, *range(100, 107)])
    driver.step()
    second = driver.add([*COMMON, *range(200, 205)])
    step = driver.schedule()
    assert driver.counts(step) == {"0": 1, "1": 5}
    assert second.num_cached_tokens == 48
    table = second.blocks.tables[0]
    assert table[:3] == first.blocks.tables[0][:3]
    assert [driver.kv.pools[0].ref_count(block) for block in table] == [2, 2, 2, 1]


def test_case_28_reuse_order_partial_then_never_used_then_cached_tail_before_head() -> None:
    driver = StepDriver(cache_config(full_group(10)))
    first = driver.add([*COMMON, *range(100, 107)])
    driver.step()
    second = driver.add([*COMMON, *range(200, 205)])
    driver.step()
    shared, partial = first.blocks.tables[0][:3], [second.blocks.tables[0][3], first.blocks.tables[0][3]]
    for request in (first, second):
        driver.scheduler.finish(request, "abort")
    order = driver.kv.pools[0].reuse_order()
    assert order == [*partial, 6, 7, 8, 9, 10, *reversed(shared)]


def test_case_29_the_first_freed_is_evicted_first_each_from_its_tail() -> None:
    driver = StepDriver(cache_config(full_group(8)))
    tables = []
    for index in range(2):
        driver.add([index] * 49, 1)
        driver.schedule()
        tables.append(list(driver.requests[-1].blocks.tables[0]))
        driver.apply()
    cached = [list(reversed(table[:3])) for table in tables]
    assert driver.kv.pools[0].reuse_order()[-6:] == cached[0] + cached[1]
    third = driver.add([3] * 64, 1)
    driver.schedule()
    evicted = third.blocks.tables[0][2:]
    assert evicted == cached[0][:2], "two blocks were unhashed; the other two are the tail of the first sequence"
    driver.apply()
    again = driver.add([0] * 49, 1)
    driver.step()
    assert again.num_cached_tokens == 16, "only the head of the first sequence is left"


def test_case_30_prompt_logprobs_read_nothing_and_still_fill_the_cache() -> None:
    driver = StepDriver()
    first = driver.add([*COMMON, 1], 1, prompt_logprobs=0)
    driver.run()
    second = driver.add([*COMMON, 1], 1, prompt_logprobs=0)
    driver.run()
    third = driver.add([*COMMON, 1], 1)
    driver.run()
    assert [request.num_cached_tokens for request in (first, second, third)] == [0, 0, 48]
    assert driver.kv.stats.queried == 49, "requests that do not read are not counted as misses"


def test_case_31_identical_prompts_in_one_step_are_computed_once() -> None:
    driver = StepDriver()
    for _ in range(2):
        driver.add(range(100), 4)
    assert driver.counts(driver.schedule()) == {"0": 100, "1": 4}
    driver.apply()
    driver.run()
    assert output(driver.requests[0]) == output(driver.requests[1])


def test_case_32_the_next_turn_computes_only_its_last_incomplete_block() -> None:
    driver = StepDriver()
    first = driver.add(range(100), 200)
    driver.run()
    driver.add(first.token_ids, 1)
    assert driver.counts(driver.schedule()) == {"1": 300 % 16}
    driver.apply()


@pytest.mark.row("KV-PREFIX-CACHE", "different cache_salt shares 0 tokens")
def test_case_33_a_salt_is_hashed_into_the_first_block_only_and_keeps_others_out() -> None:
    driver = StepDriver()
    first = driver.add([*COMMON, 1], 1, salt="salt1")
    driver.run()
    same, other, none = (driver.add([*COMMON, 1], 1, salt=salt) for salt in ("salt1", "salt2", None))
    driver.run()
    assert [request.num_cached_tokens for request in (first, same, other, none)] == [0, 48, 0, 0]


def test_case_36_reset_is_refused_while_a_request_runs_and_forgets_all_afterwards() -> None:
    driver = StepDriver()
    request = driver.add([*COMMON, 1], 2)
    driver.step()
    assert not driver.kv.reset_prefix_cache()
    assert driver.kv.pools[0].find(request.blocks.hashes[0]) is not None, "the cache is intact"
    driver.run()
    hashes = list(request.blocks.hashes)
    assert len(hashes) == 3
    assert driver.kv.reset_prefix_cache()
    assert all(driver.kv.pools[0].find(known) is None for known in hashes)
    again = driver.add([*COMMON, 1], 2)
    driver.run()
    assert again.num_cached_tokens == 0


def test_case_37_events_say_what_became_findable_what_was_overwritten_and_what_was_cleared() -> None:
    for num_blocks in (2, 3, 10):
        driver = StepDriver(cache_config(full_group(num_blocks)), record_events=True)
        pool = driver.kv.pools[0]
        driver.add(range(16 * num_blocks), 1)
        driver.run()
        (stored,) = pool.take_events()
        assert (stored.kind, len(stored.hashes)) == ("stored", num_blocks)
        driver.add([7] * (16 * num_blocks), 1)
        driver.run()
        removed, renewed = pool.take_events()
        assert (removed.kind, set(removed.hashes)) == ("removed", set(stored.hashes))
        assert (renewed.kind, len(renewed.hashes)) == ("stored", num_blocks)
        assert driver.kv.reset_prefix_cache()
        assert [event.kind for event in pool.take_events()] == ["cleared"]
        assert pool.take_events() == []


def test_case_38_the_name_of_a_request_or_conversation_is_no_part_of_identity() -> None:
    driver = StepDriver()
    driver.add([*COMMON, 1], 1, name="conversation-1")
    driver.run()
    second = driver.add([*COMMON, 1], 1, name="conversation-2")
    driver.run()
    assert second.num_cached_tokens == 48


@pytest.mark.row("KV-PREFIX-CACHE", "after a change of weights no old block is ever hit")
def test_other_weights_share_nothing() -> None:
    hashes = []
    for model in ("m", "other"):
        driver = StepDriver(model=model)
        hashes.append(driver.add([*COMMON, 1], 1).blocks.hashes)
        driver.run()
    assert not set(hashes[0]) & set(hashes[1])


@pytest.mark.row("KV-SLIDING-WINDOW-SPEC", "window 32 and 500 tokens: at most ceil(window/block)+1 blocks are held")
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_sliding_group_holds_its_window_only(block_size: int) -> None:
    cache = cache_config(full_group(1000), sliding_group(200, 32), block_size=block_size)
    driver = StepDriver(cache, max_num_batched_tokens=64)
    request = driver.add(range(300), 200)
    most = 0
    while driver.step() is not None:
        if request.num_computed > 300:
            most = max(most, driver.held(request, 1))
        else:
            assert driver.held(request, 1) <= -(-(32 + 64) // block_size) + 1
    assert len(output(request)) == 200
    assert -(-31 // block_size) <= most <= -(-32 // block_size) + 1
    assert output(request) == expected_tokens(request, driver.next_token)
    driver.assert_nothing_left()


def test_without_attention_there_is_nothing_to_count() -> None:
    driver = StepDriver(cache_config(prefix_caching=True))
    assert not driver.kv.prefix_caching and driver.kv.max_request_tokens() is None
    request = driver.add(range(30), 5)
    driver.run()
    assert output(request) == expected_tokens(request, driver.next_token)
    assert driver.kv.usage() == 0.0
