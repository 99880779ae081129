"""The scheduler with an external KV store under any order of arrivals, ends, failures and reports, against each request alone.
The store lies, fails, is slow and loses blocks; the fake worker checks the content of every KV position that a step reads."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from infer.engine.request import Request, Status
from infer.engine.step import StepPlan, StepResult
from infer.errors import KVLoadError
from infer.plugins.kv_connector import ExternalMatch, KVTransfer
from infer.testing.fake_executor import hashed_token
from kv_driver import ExternalDriver, TransferWorker
from property.test_scheduler import POISON, VOCABULARY, Load, SchedulerMachine, random_load
from step_driver import drawn_cache, expected_tokens, output


class Trouble:
    """What goes wrong, decided by name and number alone, so that a replay meets the same."""

    def __init__(self, seed: int, driver: ExternalDriver) -> None:
        self._seed = seed
        self._driver = driver
        self._ages: Counter[int] = Counter()

    def draw(self, *facts: object) -> random.Random:
        return random.Random(repr((self._seed, facts)))

    def answer(self, request_id: str, asked: int) -> ExternalMatch | None:
        request = next(r for r in self._driver.requests if r.request_id == request_id.partition("#")[0])
        chance = self.draw("answer", request_id, asked, len(request.token_ids))
        kind = chance.choice(["store", "store", "later", "lie", "error", "nonsense"])
        size = len(request.token_ids)
        if kind == "later":
            return ExternalMatch("later")
        if kind == "lie":
            return ExternalMatch("hit", chance.randint(1, size), chance.random() < 0.5)
        if kind == "error":
            raise OSError("the store is away")
        if kind == "nonsense":
            return ExternalMatch("hit", chance.choice([0, -5, size + 1, 10**9]))
        self._driver.connector.wait = chance.random() < 0.5
        return None

    def is_released(self, transfer: KVTransfer) -> bool:
        self._ages[transfer.job_id] += 1
        return self._ages[transfer.job_id] > self.draw("age", transfer.job_id).choice([0, 0, 1, 3, 12])

    def failing(self, transfer: KVTransfer) -> list[int]:
        chance = self.draw("failing", transfer.job_id)
        places = range(len(transfer.blocks))
        return [place for place in places if chance.random() < 0.2] if chance.random() < 0.3 else []

    def is_late(self, transfer: KVTransfer) -> bool:
        return self.draw("late", transfer.job_id).random() < 0.2


class TroubledWorker(TransferWorker):
    """Every step takes a second."""

    driver: ExternalDriver

    def execute(self, plan: StepPlan) -> StepResult:
        self.driver.now += 1
        return super().execute(plan)


def make_driver(values: dict[str, Any]) -> ExternalDriver:
    values = values | {"prefix_caching": True}
    seed = values["max_num_seqs"] * 31 + values["capacity"] + values["depth"]
    cache = drawn_cache(values)
    del values["depth"]
    driver = ExternalDriver(
        cache,
        next_token=hashed_token(VOCABULARY),
        save=seed % 5 != 0,
        fail_requests=seed % 7 == 0,
        timeout=(3.0, 1000.0)[seed % 2],
        worker=TroubledWorker,
        **values,
    )
    trouble = Trouble(seed, driver)
    worker: Any = driver.worker
    worker.driver = driver
    worker.row_error = lambda ids: "poisoned" if ids[-1] == POISON else None
    worker.release, worker.failing, worker.late = trouble.is_released, trouble.failing, trouble.is_late
    driver.connector.script = trouble.answer
    return driver


class ExternalLoad(Load):
    """As `Load`; transfers hold blocks too, and a load may be what a request ends of."""

    make_driver = staticmethod(make_driver)
    driver: ExternalDriver

    def reset(self, restart: bool) -> None:
        done: list[bool] = []
        self.act(lambda driver: done.append(driver.scheduler.reset_prefix_cache(restart_running=restart)))
        assert done[0] == (not any(pool.num_in_use for pool in self.driver.kv.pools))

    def check_blocks(self) -> None:
        """Every reference has an owner: a running request, a job, or a block that will be saved."""
        driver, external = self.driver, self.driver.external
        jobs = {id(job): job for job in (*external._jobs.values(), *external._loads.values())}
        for group, pool in enumerate(driver.kv.pools):
            owners = Counter[int]()
            for request in driver.scheduler.running:
                owners.update(block for block in request.blocks.tables[group] if block)
            for job in jobs.values():
                owners.update(block for block in job.held[group] if block)
            for item in (*external._saves._unconfirmed, *external._saves._confirmed):
                owners.update(block.block_id for block in item.blocks if block.group == group)
            assert all(pool.ref_count(block) == count for block, count in owners.items())
            assert pool.num_in_use == len(owners) and pool.ref_count(0) == 0
        for request in driver.requests:
            assert request.status is Status.RUNNING or not request.blocks.tables

    def check_outcome(self, request: Request) -> None:
        if isinstance(request.error, KVLoadError):
            assert self.driver.external._fail_requests
            expected = expected_tokens(request, self.driver.next_token)
            assert output(request) == expected[: len(output(request))]
        else:
            super().check_outcome(request)


class ExternalMachine(SchedulerMachine):
    make_load = ExternalLoad


ExternalMachine.TestCase.settings = settings(
    parent=settings(), stateful_step_count=30, suppress_health_check=list(HealthCheck)
)
TestExternalKV = pytest.mark.row(
    "KV-EXTERNAL-CACHE", "the third answer, deferred free and multi-group models, in any order"
)(ExternalMachine.TestCase)


@pytest.mark.row("KV-EXTERNAL-CACHE", "a store that lies, fails and is slow costs no request its tokens")
@pytest.mark.parametrize("first", [0, 50, 60, 170])
def test_random_load_with_a_store_in_trouble(first: int) -> None:
    loads = [random_load(seed, make_load=ExternalLoad) for seed in range(first, first + 10)]
    stats = [load.driver.external.stats for load in loads if isinstance(load, ExternalLoad)]
    assert sum(one.loaded_blocks for one in stats) > 100
    assert sum(one.saved_blocks for one in stats) > 100
    assert sum(one.load_failures for one in stats) > 20
    assert sum(one.lookup_failures for one in stats) > 20


@pytest.mark.heavy
@pytest.mark.parametrize("first", range(1000, 3000, 100))
def test_random_load_with_a_store_in_trouble_at_length(first: int) -> None:
    for seed in range(first, first + 100):
        random_load(seed, failing=0.03, make_load=ExternalLoad)
