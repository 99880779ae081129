"""Counters and gauges of one engine, read on demand. Owns nothing: the scheduler and the KV cache count."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from infer.engine.scheduler.scheduler import Scheduler


class KVConnectorStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The external KV store as of one moment. Counters count since start."""

    transfers: int
    """On their way now."""
    queries: int
    """Lookups that were answered."""
    hits: int
    """Of these, with more than the engine had itself."""
    hit_tokens: int
    """What the store had and the engine had not."""
    lookup_failures: int
    loaded_blocks: int
    loaded_bytes: int
    saved_blocks: int
    saved_bytes: int
    load_failures: int
    """Loads of which a block did not come, or not in time; their requests computed it."""
    save_failures: int
    """Saves of which a block was not taken."""
    skipped_saves: int
    """Blocks not saved because too many were on their way."""


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
    kv_connector: KVConnectorStatistics | None = None
    """None: no connector is named."""


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
        kv_connector=_kv_connector(scheduler),
    )


def _kv_connector(scheduler: Scheduler) -> KVConnectorStatistics | None:
    external = scheduler.external
    if external is None:
        return None
    stats = external.stats
    return KVConnectorStatistics(
        transfers=external.num_transfers,
        queries=stats.queries,
        hits=stats.hits,
        hit_tokens=stats.hit_tokens,
        lookup_failures=stats.lookup_failures,
        loaded_blocks=stats.loaded_blocks,
        loaded_bytes=stats.loaded_bytes,
        saved_blocks=stats.saved_blocks,
        saved_bytes=stats.saved_bytes,
        load_failures=stats.load_failures,
        save_failures=stats.save_failures,
        skipped_saves=stats.skipped_saves,
    )
