"""Counters and gauges of one engine, read on demand. Owns nothing: the scheduler and the KV cache count."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from infer.engine.scheduler.scheduler import Scheduler


class EngineStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """As of one moment. Counters count since start."""

    running: int
    waiting: int
    steps: int
    scheduled_tokens: int
    draft_tokens: int
    """Of those, output tokens that took no step of their own: a grammar left no choice about them."""
    finished_requests: int
    """Choices, n of a request counted n times."""
    preemptions: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    kv_usage: float
    """Share of the fullest KV pool in use, 0 to 1."""
    capturing: int = 0
    """Running requests whose rows are captured."""
    captured_rows: int = 0
    """Rows that came for requests."""
    capture_failures: int = 0
    """Requests whose rows were lost; their tokens went on."""
    uniform_blocks: int = 0
    """Captured blocks whose cells are all equal: legal, and a sign of a broken router."""


def statistics(scheduler: Scheduler) -> EngineStatistics:
    aux = scheduler.aux
    return EngineStatistics(
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        steps=scheduler.stats.steps,
        scheduled_tokens=scheduler.stats.scheduled_tokens,
        draft_tokens=scheduler.stats.draft_tokens,
        finished_requests=scheduler.stats.finished,
        preemptions=scheduler.stats.preemptions,
        prefix_queried_tokens=scheduler.kv.stats.queried,
        prefix_hit_tokens=scheduler.kv.stats.hit,
        kv_usage=scheduler.kv.usage(),
        capturing=0 if aux is None else aux.num_live,
        captured_rows=0 if aux is None else aux.stats.rows,
        capture_failures=0 if aux is None else aux.stats.failures,
        uniform_blocks=0 if aux is None else aux.stats.uniform_blocks,
    )
