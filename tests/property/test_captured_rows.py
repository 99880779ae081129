"""Captured rows under any order of arrivals, ends, preemptions, resets, failures and weight commits, at depth 1 and 2: the real
scheduler and KV accounting against a worker half that keeps every promise and checks the scheduler's."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from capture_driver import HIDDEN, ROUTES, CaptureDriver, request_rows
from infer.engine.aux.index import Key, RetainedObject, RetainedObjects
from infer.engine.aux.rows import CAPTURED
from infer.engine.request import Request, Status
from infer.engine.step import StepPlan
from infer.testing.fake_executor import hashed_token
from step_driver import (
    PlannedFailure,
    drawn_cache,
    expected_tokens,
    new_request,
    output,
)

VOCABULARY = 12
STOP = 3
POISON = 50
FIELDS = [(), (), (ROUTES.name,), (ROUTES.name,), (HIDDEN.name,), (ROUTES.name, HIDDEN.name)]

configurations = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([1, 2, 4, 8]),
        "capacity": st.sampled_from([64, 160, 640]),
        "window": st.sampled_from([None, None, 5, 16]),
        "prefix_caching": st.sampled_from([True, True, True, False]),
        "depth": st.sampled_from([1, 2]),
        "late": st.booleans(),
        "num_objects": st.sampled_from([1, 3, 10, 40, 1000]),
        "policy": st.sampled_from(["fcfs", "priority"]),
        "max_num_seqs": st.integers(1, 5),
        "max_num_batched_tokens": st.sampled_from([7, 16, 64]),
    }
)


def make_driver(values: dict[str, Any], *, capture: bool = True) -> CaptureDriver:
    values = dict(values)
    cache = drawn_cache(values)
    del values["depth"]
    driver = CaptureDriver(cache, next_token=hashed_token(VOCABULARY), capture=capture, **values)
    driver.worker.row_error = lambda ids: "poisoned" if ids[-1] == POISON else None
    return driver


def fail(plan: StepPlan) -> Exception:
    return PlannedFailure("planted")


class Load:
    """One scheduler under load, with its oracle."""

    def __init__(self, values: dict[str, Any], *, capture: bool = True) -> None:
        self.values = values
        self.depth: int = values["depth"]
        self.driver = make_driver(values, capture=capture)
        self.limit = self.driver.kv.max_request_tokens() or 0
        self.ended_by_test: set[Request] = set()
        self.most_held: dict[Request, int] = {}

    def add(
        self, prompt: list[int], max_tokens: int, choices: int, fields: tuple[str, ...], start: int, **options: Any
    ) -> None:
        prompt = prompt[-(self.limit - 2) :]
        max_tokens = min(max_tokens, self.limit - len(prompt))
        arrival = len(self.driver.requests)
        group = [
            new_request(prompt, max_tokens, arrival=arrival + i, stop_ids={STOP: None}, seed=7 + i, **options)
            for i in range(choices)
        ]
        rows = request_rows(fields, len(prompt), max_tokens, min(start, len(prompt)))
        for index, request in enumerate(group):
            request.choice_index = index
            request.outbox = group[0].outbox
            request.rows = rows if rows is None or index == 0 else rows.sibling()
        group[0].siblings = tuple(group[1:])
        self.driver.requests += group
        self.driver.scheduler.add(group[0])

    def schedule(self, *, failing: bool = False) -> bool:
        if len(self.driver.in_flight) >= self.depth:
            return False
        self.driver.worker.fail_at = fail if failing else lambda plan: None
        return self.driver.schedule() is not None

    def serve(self, steps: int) -> None:
        for _ in range(steps):
            while self.schedule():
                pass
            if self.driver.in_flight:
                self.driver.apply()
            self.check()

    def end(self, index: int, reason: Any) -> None:
        request = self.driver.requests[index]
        if request.status is not Status.FINISHED:
            self.ended_by_test.add(request)
        self.driver.scheduler.finish(request, reason)

    def preempt(self, index: int) -> None:
        running = self.driver.scheduler.running
        if running:
            self.driver.scheduler._preempt(running[index % len(running)])

    def check(self) -> None:
        """Between two steps: cursors only grow and never pass what was fed; nothing is kept without need."""
        driver = self.driver
        for request in driver.requests:
            rows = request.rows
            if rows is None or rows.failure is not None:
                continue
            assert rows.cursor >= self.most_held.get(request, 0)
            self.most_held[request] = rows.cursor
            if request.num_output:
                assert rows.cursor >= len(request.token_ids) - 1
        if driver.scheduler.aux is None:
            return
        aux = driver.aux
        asking = [r for r in driver.scheduler.running if r.rows is not None]
        assert aux.num_live <= len(asking)
        for name, store in driver.captures.stores.items():
            assert sum(key[0] == name for key in aux.retained._objects) <= store.capacity
        if not asking:
            assert aux.retained.num_pinned == 0

    @property
    def poisoned(self) -> bool:
        return any(POISON in request.token_ids for request in self.driver.requests)

    def finish(self) -> None:
        driver = self.driver
        driver.worker.fail_at = lambda plan: None
        driver.run(self.depth)
        for request in driver.requests:
            self.check_outcome(request)
        driver.worker.row_error = lambda ids: None
        driver.assert_nothing_left()
        if driver.scheduler.aux is not None:
            driver.check_drained()

    def check_outcome(self, request: Request) -> None:
        expected = expected_tokens(request, self.driver.next_token)
        assert output(request) == expected[: len(output(request))]
        if request not in self.ended_by_test and request.finish_reason != "error":
            assert output(request) == expected
        self.driver.check_versions(request)
        if request.rows is None:
            assert request.capture_fields == ()
            return
        reason = request.rows.failure
        if reason is not None and request.finish_reason != "error":
            # It hit blocks of a neighbour whose row failed in the same step or the one before: its rows were not published.
            assert self.poisoned and reason.startswith("rows of the reused prompt are lost"), reason
        if request.rows.failure is None:
            self.driver.check_rows(request)
            alone = not request.num_preemptions and not request.num_cached_tokens
            if alone and request.choice_index == 0 and len(self.driver.requests) == 1:
                assert set(request.rows.export()[request.capture_fields[0]].status) <= {CAPTURED}


def make_prompt(family: int, length: int, tail: list[int], poisoned: bool) -> list[int]:
    """Prompts of one family share their beginning."""
    return [(family * 5 + position) % VOCABULARY for position in range(length)] + tail + [POISON] * poisoned


requests = st.fixed_dictionaries(
    {
        "prompt": st.builds(
            make_prompt,
            st.integers(0, 1),
            st.integers(1, 60),
            st.lists(st.integers(0, VOCABULARY - 1), max_size=3),
            st.sampled_from([False] * 9 + [True]),
        ),
        "max_tokens": st.integers(1, 25),
        "choices": st.sampled_from([1, 1, 1, 2, 3]),
        "fields": st.sampled_from(FIELDS),
        "start": st.sampled_from([0, 0, 0, 5, 16, 100]),
        "priority": st.integers(0, 2),
        "salt": st.sampled_from([None, None, "a"]),
    }
)


class CaptureMachine(RuleBasedStateMachine):
    """Hypothesis chooses the actions: few, adversarial, shrunk when they fail."""

    @initialize(values=configurations)
    def start(self, values: dict[str, Any]) -> None:
        self.load = Load(values)

    @rule(batch=st.lists(requests, min_size=1, max_size=4))
    def add(self, batch: list[dict[str, Any]]) -> None:
        for options in batch:
            self.load.add(**options)

    @rule(failing=st.sampled_from([False, False, True]))
    def schedule(self, failing: bool) -> None:
        self.load.schedule(failing=failing)

    @rule(steps=st.integers(1, 10))
    def serve(self, steps: int) -> None:
        self.load.serve(steps)

    @precondition(lambda self: self.load.driver.in_flight)
    @rule()
    def apply(self) -> None:
        self.load.driver.apply()

    @precondition(lambda self: self.load.driver.scheduler.running)
    @rule(data=st.data(), reason=st.sampled_from(["abort", "deadline", "stop"]))
    def end(self, data: st.DataObject, reason: Any) -> None:
        self.load.end(data.draw(st.integers(0, len(self.load.driver.requests) - 1)), reason)

    @precondition(lambda self: self.load.driver.scheduler.running)
    @rule(index=st.integers(0, 5))
    def preempt(self, index: int) -> None:
        self.load.preempt(index)

    @rule(restart=st.booleans())
    def reset(self, restart: bool) -> None:
        self.load.driver.scheduler.reset_prefix_cache(restart_running=restart)

    @rule(version=st.integers(0, 2))
    def commit(self, version: int) -> None:
        self.load.driver.scheduler.commit_version(version)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "load"):
            self.load.check()

    def teardown(self) -> None:
        if hasattr(self, "load"):
            self.load.finish()


CaptureMachine.TestCase.settings = settings(
    parent=settings(), stateful_step_count=25, suppress_health_check=list(HealthCheck)
)
TestCapture = pytest.mark.row("X-AUX", "rows are complete and right in any order of events at depth 1 and 2")(
    CaptureMachine.TestCase
)


def random_values(chance: random.Random) -> dict[str, Any]:
    return {
        "block_size": chance.choice([1, 2, 4, 8]),
        "capacity": chance.choice([64, 160, 640]),
        "window": chance.choice([None, None, 5, 16]),
        "prefix_caching": chance.random() < 0.8,
        "depth": chance.choice([1, 2]),
        "late": chance.random() < 0.5,
        "num_objects": chance.choice([1, 3, 10, 40, 1000]),
        "policy": chance.choice(["fcfs", "priority"]),
        "max_num_seqs": chance.randint(1, 6),
        "max_num_batched_tokens": chance.choice([7, 16, 64]),
    }


def random_load(seed: int, *, failing: float = 0.02, asking: bool = True, capture: bool = True) -> Load:
    chance = random.Random(seed)
    load = Load(random_values(chance), capture=capture)
    arrivals = 20
    while arrivals or load.driver.scheduler.num_unfinished:
        while arrivals and chance.random() < 0.35:
            arrivals -= 1
            tail = [chance.randrange(VOCABULARY) for _ in range(chance.choice([0, 0, 3]))]
            fields = chance.choice(FIELDS)
            load.add(
                make_prompt(chance.randrange(2), chance.randint(1, 60), tail, chance.random() < 0.05),
                chance.randint(1, 25),
                chance.choice([1, 1, 1, 2, 4]),
                fields if asking else (),
                chance.choice([0, 0, 0, 5, 16, 100]),
                priority=chance.randrange(3),
                salt=chance.choice([None, None, "a"]),
            )
        running = load.driver.scheduler.running
        if running and chance.random() < 0.03:
            load.end(load.driver.requests.index(chance.choice(running)), "abort")
        if running and chance.random() < 0.05:
            load.preempt(chance.randrange(6))
        if chance.random() < 0.02:
            load.driver.scheduler.reset_prefix_cache(restart_running=True)
        if chance.random() < 0.02:
            load.driver.scheduler.commit_version(chance.randrange(3))
        load.schedule(failing=chance.random() < failing)
        load.serve(1)
    load.finish()
    return load


@pytest.mark.row("X-AUX", "rows survive prefix hits, chunked prefill, preemption and in-flight depth 2")
@pytest.mark.parametrize("first", range(0, 60, 15))
def test_random_load(first: int) -> None:
    loads = [random_load(seed) for seed in range(first, first + 15)]
    assert sum(load.driver.scheduler.stats.preemptions for load in loads) > 20
    assert sum(load.driver.captures.num_reads for load in loads) > 20, "hits were read from the store"
    assert sum(load.driver.aux.stats.rows for load in loads) > 1000


@pytest.mark.heavy
@pytest.mark.parametrize("first", range(1000, 5000, 250))
def test_random_load_at_length(first: int) -> None:
    for seed in range(first, first + 250):
        random_load(seed, failing=random.Random(seed).choice([0.0, 0.02, 0.1]))


@pytest.mark.parametrize("seed", range(100, 110))
def test_who_asks_for_nothing_changes_nothing(seed: int) -> None:
    """The same load on a scheduler that can capture and on one that cannot: the same plans, nothing else in them."""
    able = random_load(seed, asking=False)
    plain = random_load(seed, asking=False, capture=False)
    assert able.driver.worker.plans == plain.driver.worker.plans
    assert all(plan.aux is None for plan in able.driver.worker.plans)


@given(
    st.lists(
        st.tuples(st.integers(0, 12), st.sampled_from(["pin", "unpin", "discard", "missing", "gone"])), max_size=80
    ),
    st.integers(1, 5),
)
def test_retained_objects_agree_with_the_store(actions: list[tuple[int, str]], capacity: int) -> None:
    """Whatever happens: no more than fits; what is told adds up; a pinned object stays unless its bytes are distrusted."""
    gone: set[bytes] = set()
    index = RetainedObjects({"f": capacity}, lambda block_hash: block_hash not in gone)
    pins: list[RetainedObject] = []
    told: set[Key] = set()
    for number, action in actions:
        key: Key = ("f", bytes([number]), 0)
        if action == "pin":
            found = index.publish(key)
            assert (found is None) == (key not in index) and (found or index.num_pinned == capacity)
            pins += [found] if found else []
        elif action == "unpin" and pins:
            index.unpin(pins.pop(number % len(pins)))
        elif action == "discard":
            index.discard([key], even_pinned=number % 2 == 0)
        elif action == "missing":
            index.missing(key, 0)
            assert key not in index
        elif action == "gone":
            gone ^= {key[1]}
        assert all(index._objects[pin.key] is pin for pin in pins if pin.retained)
        assert len(index) <= capacity
        assert index.num_pinned == len({id(pin) for pin in pins if pin.retained})
        if number % 3 == 0:
            retain, release, _ = index.take_changes()
            assert not told & set(retain) and set(release) <= told
            told = (told | set(retain)) - set(release)
            assert told == set(index._objects)
