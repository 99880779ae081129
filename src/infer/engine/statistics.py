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
    finished_requests: int
    """Choices, n of a request counted n times."""
    preemptions: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    kv_usage: float
    """Share of the fullest KV pool in use, 0 to 1."""


def statistics(scheduler: Scheduler) -> EngineStatistics:
    return EngineStatistics(
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        steps=scheduler.stats.steps,
        scheduled_tokens=scheduler.stats.scheduled_tokens,
        finished_requests=scheduler.stats.finished,
        preemptions=scheduler.stats.preemptions,
        prefix_queried_tokens=scheduler.kv.stats.queried,
        prefix_hit_tokens=scheduler.kv.stats.hit,
        kv_usage=scheduler.kv.usage(),
    )
