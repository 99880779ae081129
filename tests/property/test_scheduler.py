"""The scheduler under any order of arrivals, ends, resets, failures and results: a state machine against a one-request oracle.
The fake worker checks the content of every KV position that a step reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from step_driver import (
    EOS,
    PlannedFailure,
    StepDriver,
    cache_config,
    expected_tokens,
    fetch,
    full_group,
    new_request,
    output,
    sliding_group,
)

from infer.engine.request import Request, Status
from infer.engine.step import StepPlan
from infer.testing.fake_executor import hashed_token

VOCABULARY = 40
STOP = 3
POISON = 50
"""A prompt that ends with this id fails at its first sample."""

configurations = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([1, 4, 16]),
        "capacity": st.sampled_from([160, 320, 1600]),
        "window": st.sampled_from([None, None, 1, 5, 16, 32]),
        "prefix_caching": st.booleans(),
        "watermark": st.sampled_from([0.0, 0.05]),
        "depth": st.integers(1, 4),
        "policy": st.sampled_from(["fcfs", "priority"]),
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.sampled_from([7, 16, 64]),
        "long_prefill_threshold": st.sampled_from([0, 20]),
        "max_num_partial_prefills": st.sampled_from([0, 2]),
        "max_long_partial_prefills": st.sampled_from([0, 1]),
        "reserve_full_prompt": st.booleans(),
    }
)


def make_driver(values: dict[str, Any]) -> StepDriver:
    values = dict(values)
    size, capacity, window = values.pop("block_size"), values.pop("capacity"), values.pop("window")
    cached, watermark = values.pop("prefix_caching"), values.pop("watermark")
    del values["depth"]
    groups = [full_group(capacity // size)]
    if window is not None:
        most = values["max_num_seqs"] * (-(-(window + values["max_num_batched_tokens"]) // size) + 1)
        groups.append(sliding_group(min(capacity // size, most), window))
    cache = cache_config(*groups, block_size=size, watermark=watermark, prefix_caching=cached)
    driver = StepDriver(cache, next_token=hashed_token(VOCABULARY), **values)
    driver.worker.row_error = lambda ids: "poisoned" if ids[-1] == POISON else None
    return driver


class SchedulerMachine(RuleBasedStateMachine):
    """Every action is also written down, and replayed at the end: same inputs, same plans."""

    @initialize(values=configurations)
    def start(self, values: dict[str, Any]) -> None:
        self.values = values
        self.depth: int = values["depth"]
        self.driver = make_driver(values)
        self.limit = self.driver.kv.max_request_tokens() or 0
        self.log: list[Callable[[StepDriver], None]] = []
        self.ended_by_test: set[str] = set()
        self.failures = False

    def act(self, action: Callable[[StepDriver], None]) -> None:
        self.log.append(action)
        action(self.driver)

    @rule(
        family=st.integers(0, 2),
        length=st.integers(1, 110),
        tail=st.lists(st.integers(0, VOCABULARY - 1), max_size=5),
        max_tokens=st.integers(1, 40),
        choices=st.sampled_from([1, 1, 1, 2, 3]),
        poisoned=st.sampled_from([False] * 7 + [True]),
        options=st.fixed_dictionaries(
            {
                "priority": st.integers(0, 2),
                "salt": st.sampled_from([None, "a"]),
                "prompt_logprobs": st.sampled_from([None, None, 0]),
            }
        ),
    )
    def add(
        self, family: int, length: int, tail: list[int], max_tokens: int, choices: int, poisoned: bool, options: Any
    ) -> None:
        prompt = [(family * 7 + position) % VOCABULARY for position in range(length)] + tail
        prompt = (prompt + [POISON] * poisoned)[-(self.limit - 2) :]
        max_tokens = min(max_tokens, self.limit - len(prompt))
        first = len(self.driver.requests)

        def action(driver: StepDriver) -> None:
            group = [
                new_request(
                    prompt,
                    max_tokens,
                    arrival=first + index,
                    stop_ids={STOP: None, EOS: None},
                    seed=7 + index,
                    **(options if index == 0 else options | {"prompt_logprobs": None}),
                )
                for index in range(choices)
            ]
            for index, request in enumerate(group):
                request.choice_index = index
                request.outbox = group[0].outbox
            group[0].siblings = tuple(group[1:])
            driver.requests += group
            driver.scheduler.add(group[0])

        self.act(action)

    @precondition(lambda self: len(self.driver.in_flight) < self.depth)
    @rule()
    def schedule(self) -> None:
        running = {request.request_id for request in self.driver.scheduler.running}
        self.act(lambda driver: None if driver.schedule() else None)
        if not self.driver.in_flight:
            return
        step = self.driver.in_flight[-1][0]
        plan, config = step.plan, self.driver.scheduler.config
        assert plan.num_tokens <= config.max_num_batched_tokens
        assert len(set(plan.slots)) == len(plan.slots) <= config.max_num_seqs
        assert all(0 <= slot < config.max_num_seqs for slot in plan.slots)
        new = [request.request_id not in running for request in step.requests]
        assert new == sorted(new), "a waiting request came before a running one"

    @precondition(lambda self: self.driver.in_flight)
    @rule()
    def apply(self) -> None:
        self.act(lambda driver: driver.apply())

    @precondition(lambda self: self.driver.requests)
    @rule(data=st.data(), reason=st.sampled_from(["abort", "deadline", "stop"]))
    def end(self, data: st.DataObject, reason: Any) -> None:
        index = data.draw(st.integers(0, len(self.driver.requests) - 1))
        if self.driver.requests[index].status is not Status.FINISHED:
            self.ended_by_test.add(self.driver.requests[index].request_id)
        self.act(lambda driver: driver.scheduler.finish(driver.requests[index], reason))

    @rule(restart=st.booleans())
    def reset(self, restart: bool) -> None:
        held = any(pool.num_in_use for pool in self.driver.kv.pools)
        done: list[bool] = []
        self.act(lambda driver: done.append(driver.scheduler.reset_prefix_cache(restart_running=restart)))
        assert done[0] == (restart or not held)

    @precondition(lambda self: len(self.driver.in_flight) < self.depth)
    @rule()
    def schedule_a_step_that_fails(self) -> None:
        def action(driver: StepDriver) -> None:
            driver.worker.fail_at = fail
            driver.schedule()
            driver.worker.fail_at = lambda plan: None

        self.failures = True
        self.act(action)

    @invariant()
    def cursors_hold(self) -> None:
        for request in self.driver.requests:
            assert 0 <= request.num_discarded <= request.num_in_flight
            assert request.num_pending >= 0
            assert request.num_output + request.num_pending <= request.max_tokens or request.finish_reason
            if request.status is Status.RUNNING:
                assert request.num_computed <= len(request.token_ids) + request.num_pending

    @invariant()
    def every_block_is_counted(self) -> None:
        driver = self.driver
        assert len(driver.scheduler.running) <= driver.scheduler.config.max_num_active_seqs
        for group, pool in enumerate(driver.kv.pools):
            owners = Counter[int]()
            for request in driver.scheduler.running:
                table = [block for block in request.blocks.tables[group] if block]
                assert len(set(table)) == len(table)
                owners.update(table)
            assert {
                block: pool.ref_count(block) for block in range(1, pool.num_blocks + 1) if pool.ref_count(block)
            } == (dict(owners))
            assert pool.num_in_use == len(owners) and pool.ref_count(0) == 0
        for request in driver.requests:
            assert request.status is Status.RUNNING or not request.blocks.tables

    @invariant()
    def a_window_is_all_that_a_decoding_request_holds(self) -> None:
        window = self.values["window"]
        if window is not None:
            size = self.driver.kv.block_size
            for request in self.driver.scheduler.running:
                if (
                    not request.is_prefilling
                    and request.num_to_compute <= 1
                    and request.num_computed > request.prompt_len
                ):
                    assert self.driver.held(request, 1) <= -(-window // size) + 1

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.act(lambda driver: driver.run(self.depth))
        for request in self.driver.requests:
            self.check_outcome(request)
        self.check_replay()
        self.driver.worker.row_error = lambda ids: None
        self.driver.assert_nothing_left()

    def check_outcome(self, request: Request) -> None:
        expected = expected_tokens(request, self.driver.next_token)
        if request.request_id in self.ended_by_test:
            assert output(request) == expected[: len(output(request))]
        elif request.finish_reason == "error":
            assert self.failures or request.token_ids[-1] == POISON
            assert output(request) == expected[: len(output(request))]
        else:
            assert output(request) == expected
            assert request.finish_reason == ("stop" if expected[-1] == STOP else "length")
            if request.sampling.prompt_logprobs is not None:
                assert request.num_prompt_logprobs == request.prompt_len - 1

    def check_replay(self) -> None:
        twin = make_driver(self.values)
        for action in self.log:
            action(twin)
        assert twin.worker.plans == self.driver.worker.plans
        by_outbox: dict[int, list[Request]] = {}
        for request in self.driver.requests:
            by_outbox.setdefault(id(request.outbox), []).append(request)
        for group in by_outbox.values():
            updates = fetch(group[0])
            assert sorted(update.choice_index for update in updates) == [request.choice_index for request in group]
            for update in updates:
                request = group[update.choice_index]
                assert update.token_ids == output(request), "what was delivered is what was accepted"
                assert update.finish_reason == request.finish_reason


def fail(plan: StepPlan) -> Exception:
    return PlannedFailure("planted")


SchedulerMachine.TestCase.settings = settings(
    parent=settings(), stateful_step_count=70, suppress_health_check=list(HealthCheck)
)
TestScheduler = pytest.mark.row(
    "ENG-ASYNC-SCHED", "a stress mix at depth 1 to 4 gives the tokens of one request alone"
)(SchedulerMachine.TestCase)
