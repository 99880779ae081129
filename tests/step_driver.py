"""Drives the control plane by hand: scheduler, KV accounting and a fake worker, one call per phase of a step.
For tests; runs in the test's own thread without an event loop. Owns the steps in flight."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import anyio

from infer.config.resolve import CacheGroup, ResolvedCache, ResolvedScheduler
from infer.engine.kv_cache.external import ExternalKV
from infer.engine.kv_cache.manager import KVCacheManager
from infer.engine.outputs import ChoiceUpdate, Outbox
from infer.engine.repetition import RepetitionDetector
from infer.engine.request import Request, Status
from infer.engine.scheduler.budget import ScheduledStep
from infer.engine.scheduler.scheduler import Scheduler
from infer.engine.step import SamplingSpec, StepPlan, StepResult
from infer.options import RepetitionDetection
from infer.testing.fake_executor import FakeWorker, NextToken, hashed_token

EOS = 999_999
"""No token function of these tests draws it by accident."""


def scheduler_config(**changes: Any) -> ResolvedScheduler:
    values: dict[str, Any] = {
        "max_num_seqs": 16,
        "max_num_batched_tokens": 1024,
        "max_num_waiting": None,
        "policy": "fcfs",
        "chunked_prefill": True,
        "long_prefill_threshold": 0,
        "max_num_partial_prefills": 0,
        "max_long_partial_prefills": 0,
        "reserve_full_prompt": False,
        "in_flight_depth": 1,
        "stream_interval": 1,
        "scheduler_class": None,
        "max_model_len": 4096,
    } | changes
    values.setdefault("max_num_active_seqs", values["max_num_seqs"])
    return ResolvedScheduler(**values)


def full_group(num_blocks: int) -> CacheGroup:
    return CacheGroup(name="full", window=None, num_blocks=num_blocks, bytes_per_block=1)


def sliding_group(num_blocks: int, window: int) -> CacheGroup:
    return CacheGroup(name="sliding", window=window, num_blocks=num_blocks, bytes_per_block=1)


def cache_config(
    *groups: CacheGroup, block_size: int = 16, watermark: float = 0.0, prefix_caching: bool = True
) -> ResolvedCache:
    return ResolvedCache(
        block_size=block_size, dtype="float32", prefix_caching=prefix_caching, watermark=watermark, groups=groups
    )


def drawn_cache(values: dict[str, Any]) -> ResolvedCache:
    """Takes what describes a cache out of the values of a drawn load, and leaves the scheduler's. A sliding group has as
    many blocks as its requests can need."""
    size, capacity, window = values.pop("block_size"), values.pop("capacity"), values.pop("window")
    groups = [full_group(capacity // size)]
    if window is not None:
        most = values["max_num_seqs"] * (-(-(window + values["max_num_batched_tokens"]) // size) + 1)
        groups.append(sliding_group(min(capacity // size, most), window))
    return cache_config(
        *groups,
        block_size=size,
        watermark=values.pop("watermark", 0.0),
        prefix_caching=values.pop("prefix_caching"),
    )


def new_request(
    prompt: Sequence[int],
    max_tokens: int = 16,
    *,
    arrival: int = 0,
    name: str | None = None,
    priority: int = 0,
    salt: str | None = None,
    stop_ids: dict[int, int | None] | None = None,
    deadline: float | None = None,
    interval: int = 1,
    rule: RepetitionDetection | None = None,
    **sampling: Any,
) -> Request:
    return Request(
        request_id=name or str(arrival),
        prompt_ids=prompt,
        sampling=SamplingSpec(**({"seed": 7} | sampling)),
        max_tokens=max_tokens,
        stop_ids={EOS: None} if stop_ids is None else stop_ids,
        outbox=Outbox(interval),
        priority=priority,
        arrival=arrival,
        cache_salt=salt,
        deadline=deadline,
        repetition=None if rule is None else RepetitionDetector(rule),
    )


def expected_tokens(request: Request, next_token: NextToken) -> list[int]:
    """What the request answers when nobody else exists: the oracle of every scheduling test."""
    known, out = list(request.token_ids[: request.prompt_len]), list[int]()
    while len(out) < request.max_tokens:
        out.append(next_token(known, request.sampling))
        known.append(out[-1])
        if out[-1] in request.stop_ids:
            break
    return out


def output(request: Request) -> list[int]:
    return request.token_ids[request.prompt_len :]


def fetch(request: Request) -> list[ChoiceUpdate]:
    """What the outbox has for the reader now; fails if the reader would have to wait."""
    if not request.outbox._ready:
        raise AssertionError("nothing is due in the outbox")
    return anyio.run(request.outbox.take)


class StepDriver:
    """`schedule` plans and executes, `apply` books the oldest result; `step` and `run` do both."""

    def __init__(
        self,
        cache: ResolvedCache | None = None,
        *,
        next_token: NextToken | None = None,
        model: str = "m",
        record_events: bool = False,
        scheduler_class: type[Scheduler] = Scheduler,
        clock: Callable[[], float] = lambda: 0.0,
        external: Callable[[KVCacheManager], ExternalKV] | None = None,
        worker: type[FakeWorker] = FakeWorker,
        **scheduler: Any,
    ) -> None:
        cache = cache or cache_config(full_group(1000))
        self.cache = cache
        self.next_token = next_token or hashed_token(1000)
        self.kv = KVCacheManager(cache, model, record_events=record_events)
        outside = None if external is None else external(self.kv)
        self.scheduler = scheduler_class(scheduler_config(**scheduler), self.kv, external=outside, clock=clock)
        self.worker = worker(cache.groups, cache.block_size, self.next_token)
        self.in_flight: deque[tuple[ScheduledStep, StepResult | Exception]] = deque()
        self.requests: list[Request] = []
        self._arrivals = itertools.count()

    def add(self, prompt: Sequence[int], max_tokens: int = 16, **options: Any) -> Request:
        options.setdefault("arrival", next(self._arrivals))
        request = new_request(prompt, max_tokens, **options)
        self.requests.append(request)
        self.scheduler.add(request)
        return request

    def schedule(self) -> ScheduledStep | None:
        step = self.scheduler.schedule()
        if step is not None:
            result: StepResult | Exception
            try:
                result = self.worker.execute(step.plan)
            except PlannedFailure as failure:
                result = failure
            self.in_flight.append((step, result))
        return step

    def apply(self, tokens: dict[Request, list[int]] | None = None, errors: dict[Request, str] | None = None) -> None:
        """Book the oldest step; `tokens` replaces what the worker drew, `errors` fails rows."""
        step, result = self.in_flight.popleft()
        if isinstance(result, Exception):
            self.scheduler.fail(result)
            return
        for request, ids in (tokens or {}).items():
            result.token_ids[step.requests.index(request)] = ids
        for request, reason in (errors or {}).items():
            row = step.requests.index(request)
            result.errors[row] = reason
            result.token_ids[row] = []
        self.scheduler.apply(result)

    def step(self, depth: int = 1) -> StepPlan | None:
        """Plan up to the depth, book one result; the plan booked, or None when there was nothing to do."""
        while len(self.in_flight) < depth and self.schedule() is not None:
            pass
        if not self.in_flight:
            return None
        plan = self.in_flight[0][0].plan
        self.apply()
        return plan

    def run(self, depth: int = 1, limit: int = 10_000) -> None:
        """Until nothing is left; a scheduler that stands still fails."""
        for _ in range(limit):
            if self.step(depth) is None:
                break
        assert not self.scheduler.num_unfinished, "requests are left and no step can be planned"

    def counts(self, step: ScheduledStep | None) -> dict[str, int]:
        """Tokens per request of a planned step."""
        assert step is not None, "nothing was planned"
        return {request.request_id: count for request, count in zip(step.requests, step.plan.counts, strict=True)}

    def held(self, request: Request, group: int = 0) -> int:
        """Blocks the request holds in one group."""
        return sum(1 for block in request.blocks.tables[group] if block) if request.blocks.tables else 0

    def assert_nothing_left(self) -> None:
        """All requests ended, every block is free, every slot can be taken again."""
        assert not self.scheduler.num_unfinished and not self.in_flight
        assert all(request.status is Status.FINISHED for request in self.requests)
        assert [pool.num_in_use for pool in self.kv.pools] == [0] * len(self.kv.pools)
        for pool in self.kv.pools:
            assert sorted(pool.reuse_order()) == list(range(1, pool.num_blocks + 1))
            assert not any(pool.ref_count(block) for block in range(pool.num_blocks + 1))
        probes = [self.add([1], 1) for _ in range(self.scheduler.config.max_num_active_seqs)]
        self.run()
        assert all(request.finish_reason for request in probes)
        assert [pool.num_in_use for pool in self.kv.pools] == [0] * len(self.kv.pools)


class PlannedFailure(Exception):
    """A step failure that a test planted."""
