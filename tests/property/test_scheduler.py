"""The scheduler under any order of arrivals, ends, resets, failures and results: a state machine against a one-request oracle.
The fake worker checks the content of every KV position that a step reads."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from infer.engine.request import Request, Status
from infer.engine.step import StepPlan
from infer.testing.fake_executor import hashed_token
from step_driver import (
    EOS,
    PlannedFailure,
    StepDriver,
    drawn_cache,
    expected_tokens,
    fetch,
    new_request,
    output,
)

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
    cache = drawn_cache(values)
    del values["depth"]
    driver = StepDriver(cache, next_token=hashed_token(VOCABULARY), **values)
    driver.worker.row_error = lambda ids: "poisoned" if ids[-1] == POISON else None
    return driver


class Load:
    """One scheduler under load. Every action is also written down, and replayed at the end: same inputs, same plans."""

    make_driver: Callable[[dict[str, Any]], StepDriver] = staticmethod(make_driver)

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self.depth: int = values["depth"]
        self.driver = self.make_driver(values)
        self.limit = self.driver.kv.max_request_tokens() or 0
        self.log: list[Callable[[StepDriver], None]] = []
        self.ended_by_test: set[str] = set()
        self.failures = False

    def act(self, action: Callable[[StepDriver], None]) -> None:
        self.log.append(action)
        action(self.driver)

    def add(self, prompt: list[int], max_tokens: int, choices: int, **options: Any) -> None:
        prompt = prompt[-(self.limit - 2) :]
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

    def schedule(self, *, failing: bool = False) -> bool:
        def action(driver: StepDriver) -> None:
            driver.worker.fail_at = fail if failing else lambda plan: None
            driver.schedule()

        if len(self.driver.in_flight) >= self.depth:
            return False
        before = len(self.driver.in_flight)
        self.failures = self.failures or failing
        self.act(action)
        if len(self.driver.in_flight) == before:
            return False
        step = self.driver.in_flight[-1][0]
        plan, config = step.plan, self.driver.scheduler.config
        assert plan.num_tokens <= config.max_num_batched_tokens
        assert len(set(plan.slots)) == len(plan.slots) <= config.max_num_seqs
        assert all(0 <= slot < config.max_num_seqs for slot in plan.slots)
        new = [request.started_step == plan.step_id for request in step.requests]
        assert new == sorted(new), "a waiting request came before a running one"
        self.check_partial_prefills()
        return True

    def check_partial_prefills(self) -> None:
        config = self.driver.scheduler.config
        partial = [request for request in self.driver.scheduler.running if request.is_prefilling]
        assert not config.max_num_partial_prefills or len(partial) <= config.max_num_partial_prefills
        if config.max_long_partial_prefills and config.long_prefill_threshold:
            num_long = sum(request.prompt_len > config.long_prefill_threshold for request in partial)
            assert num_long <= config.max_long_partial_prefills

    def serve(self, steps: int) -> None:
        for _ in range(steps):
            while self.schedule():
                pass
            if self.driver.in_flight:
                self.act(lambda driver: driver.apply())
            self.check()

    def end(self, index: int, reason: Any) -> None:
        if self.driver.requests[index].status is not Status.FINISHED:
            self.ended_by_test.add(self.driver.requests[index].request_id)
        self.act(lambda driver: driver.scheduler.finish(driver.requests[index], reason))

    def reset(self, restart: bool) -> None:
        held = any(pool.num_in_use for pool in self.driver.kv.pools)
        done: list[bool] = []
        self.act(lambda driver: done.append(driver.scheduler.reset_prefix_cache(restart_running=restart)))
        assert done[0] == (restart or not held)

    def check(self) -> None:
        self.check_cursors()
        self.check_blocks()
        self.check_windows()

    def check_cursors(self) -> None:
        for request in self.driver.requests:
            assert 0 <= request.num_discarded <= request.num_in_flight
            assert request.num_pending >= 0
            assert request.num_output + request.num_pending <= request.max_tokens or request.finish_reason
            if request.status is Status.RUNNING:
                assert request.num_computed <= len(request.token_ids) + request.num_pending

    def check_blocks(self) -> None:
        """Owners and reference counts agree, block by block."""
        driver = self.driver
        assert len(driver.scheduler.running) <= driver.scheduler.config.max_num_active_seqs
        for group, pool in enumerate(driver.kv.pools):
            owners = Counter[int]()
            for request in driver.scheduler.running:
                table = [block for block in request.blocks.tables[group] if block]
                assert len(set(table)) == len(table)
                owners.update(table)
            assert all(pool.ref_count(block) == count for block, count in owners.items())
            assert pool.num_in_use == len(owners) and pool.ref_count(0) == 0
        for request in driver.requests:
            assert request.status is Status.RUNNING or not request.blocks.tables

    def check_windows(self) -> None:
        window = self.values["window"]
        if window is not None:
            bound = -(-window // self.driver.kv.block_size) + 1
            for request in self.driver.scheduler.running:
                if request.num_to_compute <= 1 and request.num_computed > request.prompt_len:
                    assert self.driver.held(request, 1) <= bound

    def finish(self) -> None:
        """Serve to the end and compare with each request alone."""
        self.act(lambda driver: setattr(driver.worker, "fail_at", lambda plan: None))
        self.act(lambda driver: driver.run(self.depth))
        for request in self.driver.requests:
            self.check_outcome(request)
        self.check_replay()
        self.check_deliveries()
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
        twin = self.make_driver(self.values)
        for action in self.log:
            action(twin)
        assert twin.worker.plans == self.driver.worker.plans

    def check_deliveries(self) -> None:
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


def make_prompt(family: int, length: int, tail: list[int], poisoned: bool) -> list[int]:
    """Prompts of one family share their beginning."""
    return [(family * 7 + position) % VOCABULARY for position in range(length)] + tail + [POISON] * poisoned


requests = st.fixed_dictionaries(
    {
        "prompt": st.builds(
            make_prompt,
            st.integers(0, 2),
            st.integers(1, 110),
            st.lists(st.integers(0, VOCABULARY - 1), max_size=5),
            st.sampled_from([False] * 7 + [True]),
        ),
        "max_tokens": st.integers(1, 40),
        "choices": st.sampled_from([1, 1, 1, 2, 3]),
        "priority": st.integers(0, 2),
        "salt": st.sampled_from([None, "a"]),
        "prompt_logprobs": st.sampled_from([None, None, 0]),
    }
)


class SchedulerMachine(RuleBasedStateMachine):
    """Hypothesis chooses the actions: few, adversarial, shrunk when they fail."""

    make_load: Callable[[dict[str, Any]], Load] = Load

    @initialize(values=configurations)
    def start(self, values: dict[str, Any]) -> None:
        self.load = self.make_load(values)

    @rule(batch=st.lists(requests, min_size=1, max_size=4))
    def add(self, batch: list[dict[str, Any]]) -> None:
        for options in batch:
            self.load.add(**options)

    @rule(failing=st.sampled_from([False, False, False, True]))
    def schedule(self, failing: bool) -> None:
        self.load.schedule(failing=failing)

    @rule(steps=st.integers(1, 12))
    def serve(self, steps: int) -> None:
        self.load.serve(steps)

    @precondition(lambda self: self.load.driver.scheduler.running)
    @rule(data=st.data(), reason=st.sampled_from(["abort", "deadline", "stop"]))
    def end(self, data: st.DataObject, reason: Any) -> None:
        self.load.end(data.draw(st.integers(0, len(self.load.driver.requests) - 1)), reason)

    @rule(restart=st.booleans())
    def reset(self, restart: bool) -> None:
        self.load.reset(restart)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "load"):
            self.load.check()

    def teardown(self) -> None:
        if hasattr(self, "load"):
            self.load.finish()


SchedulerMachine.TestCase.settings = settings(
    parent=settings(), stateful_step_count=30, suppress_health_check=list(HealthCheck)
)
TestScheduler = pytest.mark.row(
    "ENG-ASYNC-SCHED", "a stress mix at depth 1 to 4 gives the tokens of one request alone"
)(SchedulerMachine.TestCase)


def random_values(chance: random.Random) -> dict[str, Any]:
    return {
        "block_size": chance.choice([1, 4, 16]),
        "capacity": chance.choice([160, 320, 1600]),
        "window": chance.choice([None, None, 1, 5, 16, 32]),
        "prefix_caching": chance.random() < 0.8,
        "watermark": chance.choice([0.0, 0.05]),
        "depth": chance.randint(1, 4),
        "policy": chance.choice(["fcfs", "priority"]),
        "max_num_seqs": chance.randint(1, 8),
        "max_num_batched_tokens": chance.choice([7, 16, 64]),
        "long_prefill_threshold": chance.choice([0, 20]),
        "max_num_partial_prefills": chance.choice([0, 2]),
        "max_long_partial_prefills": chance.choice([0, 1]),
        "reserve_full_prompt": chance.random() < 0.3,
    }


def random_load(seed: int, failing: float = 0.01, make_load: Callable[[dict[str, Any]], Load] = Load) -> Load:
    """Forty arrivals while the engine serves, with now and then an abort, a restart or a failed step."""
    chance = random.Random(seed)
    load = make_load(random_values(chance))
    arrivals = 25
    while arrivals or load.driver.scheduler.num_unfinished:
        while arrivals and chance.random() < 0.3:
            arrivals -= 1
            tail = [chance.randrange(VOCABULARY) for _ in range(chance.choice([0, 0, 5]))]
            load.add(
                make_prompt(chance.randrange(3), chance.randint(1, 110), tail, chance.random() < 0.05),
                chance.randint(1, 40),
                chance.choice([1, 1, 1, 2, 4]),
                priority=chance.randrange(3),
                salt=chance.choice([None, "a"]),
                prompt_logprobs=chance.choice([None, None, 0]),
            )
        if load.driver.scheduler.running and chance.random() < 0.02:
            load.end(load.driver.requests.index(chance.choice(load.driver.scheduler.running)), "abort")
        if chance.random() < 0.01:
            load.reset(restart=True)
        load.schedule(failing=chance.random() < failing)
        load.serve(1)
    load.finish()
    return load


@pytest.mark.row("ENG-PREEMPT-RECOMPUTE", "preempted and recomputed, every request's tokens equal its solo run")
@pytest.mark.row("KV-SLIDING-WINDOW-SPEC", "a group holds at most ceil(window/block)+1 blocks per decoding request")
@pytest.mark.parametrize("first", range(0, 40, 10))
def test_random_load(first: int) -> None:
    loads = [random_load(seed) for seed in range(first, first + 10)]
    assert sum(load.driver.scheduler.stats.preemptions for load in loads) > 20
    assert sum(load.driver.kv.stats.hit for load in loads) > 1000


def test_random_load_with_many_failed_steps() -> None:
    loads = [random_load(seed, failing=0.05) for seed in range(30, 40)]
    assert sum(request.finish_reason == "error" for load in loads for request in load.driver.requests) > 20


@pytest.mark.heavy
@pytest.mark.parametrize("first", range(1000, 3000, 100))
def test_random_load_at_length(first: int) -> None:
    loads = [random_load(seed) for seed in range(first, first + 100)]
    assert sum(load.driver.scheduler.stats.preemptions for load in loads) > 200
