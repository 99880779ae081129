"""scheduler.policy="longest_prefix": tokens stay as they are, hits under pressure rise, and nobody waits for ever."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from infer import ConfigError, EngineConfig
from infer.engine.request import Request
from infer.engine.scheduler.policy import MAX_OVERTAKEN, PREFIX_WINDOW, WaitingQueue
from infer.testing.fake_engine import fake_engine
from served import letters
from step_driver import StepDriver, cache_config, expected_tokens, full_group, new_request, output

ROW = "ENG-SGLANG-BEHAVIOR-FLAG"


def driven(policy: str, prompts: Sequence[Sequence[int]], *, blocks: int, depth: int = 1, **more: Any) -> StepDriver:
    driver = StepDriver(cache_config(full_group(blocks)), policy=policy, **more)
    for prompt in prompts:
        driver.add(prompt, 6)
    driver.run(depth)
    assert [output(r) for r in driver.requests] == [expected_tokens(r, driver.next_token) for r in driver.requests]
    return driver


def group(number: int, length: int) -> list[int]:
    """A prompt's beginning that its group shares."""
    return [number] * length


@pytest.mark.row(ROW, "per-request tokens are identical with the order on and off")
@given(
    asked=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60), st.integers(1, 40)), min_size=1, max_size=14),
    blocks=st.integers(9, 20),
    seats=st.integers(1, 4),
    depth=st.integers(1, 3),
    budget=st.integers(8, 64),
)
def test_tokens_are_those_of_fcfs(
    asked: list[tuple[int, int, int]], blocks: int, seats: int, depth: int, budget: int
) -> None:
    """Both runs are compared with what each request answers alone."""
    prompts = [group(number, shared) + [100 + i] * own for i, (number, shared, own) in enumerate(asked)]
    limits = {"max_num_seqs": seats, "max_num_batched_tokens": budget}
    for policy in ("fcfs", "longest_prefix"):
        driven(policy, prompts, blocks=blocks, depth=depth, **limits).assert_nothing_left()


@pytest.mark.row(ROW, "total hit tokens under pressure rise")
@pytest.mark.parametrize(("groups", "seats"), [(2, 1), (4, 1), (4, 2), (6, 2)])
def test_hits_rise_when_the_cache_is_too_small_for_all(groups: int, seats: int) -> None:
    """Interleaved conversations of which the cache can keep one or two: in order of arrival each drives the other out."""
    prompts = [group(i % groups, 96) + [1000 + i] * 20 for i in range(6 * groups)]
    hits = {
        policy: driven(policy, prompts, blocks=9 * seats, max_num_seqs=seats).kv.stats.hit
        for policy in ("fcfs", "longest_prefix")
    }
    assert hits["longest_prefix"] > 2 * hits["fcfs"]
    if seats == 1:
        assert hits["longest_prefix"] == 5 * groups * 96, "one group after the other"


@pytest.mark.row(ROW, "starvation is bounded")
def test_a_request_without_a_hit_is_passed_so_often_and_not_once_more() -> None:
    driver = StepDriver(cache_config(full_group(9)), policy="longest_prefix", max_num_seqs=1)
    hot = itertools.count()
    driver.add([7] * 64 + [1], 1)
    driver.step()
    cold = driver.add([9] * 64, 1)
    order: list[str] = []
    for _ in range(3 * MAX_OVERTAKEN):
        driver.add([7] * 64 + [next(hot) + 100], 1)  # somebody with a longer hit is always there
        step = driver.schedule()
        assert step is not None
        order += [request.request_id for request in step.requests]
        driver.apply()
    assert order.index(cold.request_id) == MAX_OVERTAKEN
    assert len(order) == 3 * MAX_OVERTAKEN


@pytest.mark.row(ROW, "starvation is bounded")
@given(
    cached=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    leaves=st.lists(st.integers(0, 11), max_size=12),
    bound=st.integers(0, 4),
)
def test_nobody_is_overtaken_more_often_than_the_bound(cached: list[int], leaves: list[int], bound: int) -> None:
    """The queue alone, against counting by hand; later arrivals keep coming. Some find no room at first (`leaves`)."""
    counts = dict[int, int]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("infer.engine.scheduler.policy.MAX_OVERTAKEN", bound)
        queue = WaitingQueue("longest_prefix", lambda request: counts[request.arrival])
        present = list[Request]()
        arrivals = itertools.count()

        def push() -> None:
            request = new_request([1], arrival=next(arrivals))
            counts[request.arrival] = cached[request.arrival % len(cached)]
            present.append(request)
            queue.push(request)

        push()
        for number in [*leaves, *range(60)]:
            push()
            best = queue.next_up()
            worn = [request for request in present if request.num_overtaken >= bound]
            wanted = worn[:1] or [max(present, key=lambda request: (counts[request.arrival], -request.arrival))]
            assert best is wanted[0]
            assert [queue.next_up(i) for i in range(len(queue))] != [] and len(
                {queue.next_up(i).arrival for i in range(len(queue))}
            ) == len(present), "every request once"
            if number % 3 == 2:
                continue
            before = [request for request in present if request.arrival < best.arrival]
            expected = [request.num_overtaken + 1 for request in before]
            queue.admit(best)
            present.remove(best)
            assert [request.num_overtaken for request in before] == expected
            assert max(expected, default=0) <= bound


def test_only_the_head_of_a_long_queue_is_compared() -> None:
    asked: list[int] = []

    def cached(request: Request) -> int:
        asked.append(request.arrival)
        return request.arrival

    queue = WaitingQueue("longest_prefix", cached)
    for arrival in range(3 * PREFIX_WINDOW):
        queue.push(new_request([1], arrival=arrival))
    assert queue.next_up().arrival == PREFIX_WINDOW - 1
    assert sorted(asked) == list(range(PREFIX_WINDOW))
    assert queue.next_up(PREFIX_WINDOW).arrival == PREFIX_WINDOW


@given(lengths=st.lists(st.integers(1, 60), min_size=2, max_size=8), blocks=st.integers(9, 16))
def test_without_anything_shared_the_trace_is_that_of_fcfs(lengths: list[int], blocks: int) -> None:
    prompts = [[index] * length for index, length in enumerate(lengths)]
    plain, ordered = (
        driven(policy, prompts, blocks=blocks, depth=2, max_num_batched_tokens=32)
        for policy in ("fcfs", "longest_prefix")
    )
    assume(not plain.scheduler.stats.preemptions)  # a preempted request finds its own blocks, and may pass with them
    assert plain.worker.plans == ordered.worker.plans


@pytest.mark.anyio
async def test_it_needs_a_prefix_cache() -> None:
    config = EngineConfig(scheduler={"policy": "longest_prefix"}, cache={"prefix_caching": False})
    with pytest.raises(ConfigError, match=r"scheduler\.policy='longest_prefix' needs cache\.prefix_caching=True"):
        async with fake_engine(letters, config):
            pass
