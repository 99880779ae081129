"""What the scheduler half of the external KV store keeps: transfers, answers, counters, and whether there is an outage.

Runs in the loop task; plain records, but for `Outages`, which owns what was complained about.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from infer.engine.kv_cache.block_pool import BlockPool
from infer.engine.kv_cache.manager import PrefixHit
from infer.plugins.kv_connector import KVTransfer

if TYPE_CHECKING:
    from infer.engine.request import Request

logger = logging.getLogger(__name__)


class Verdict(Enum):
    """Why a waiting request is not scheduled now."""

    WAIT = "wait"
    """For an answer or for its blocks: others may pass it."""
    FULL = "full"
    """There is no room for what could be loaded."""


@dataclass(slots=True)
class ExternalStats:
    """Counters since start."""

    queries: int = 0
    """Definite answers to lookups."""
    hits: int = 0
    hit_tokens: int = 0
    """That the store had and the engine had not."""
    lookup_failures: int = 0
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    saved_blocks: int = 0
    saved_bytes: int = 0
    load_failures: int = 0
    """Loads of which at least one block did not come, or not in time."""
    save_failures: int = 0
    skipped_saves: int = 0
    """Blocks not saved because too many were on their way."""
    unknown_reports: int = 0


class JobState(Enum):
    UNSENT = "unsent"
    """A load that the step of its request will wait for, should that be admitted."""
    SENT = "sent"
    READY = "ready"
    """Loaded; its request is not admitted yet."""


@dataclass(slots=True, eq=False)
class Job:
    """A transfer. It holds one reference to each block in `held`, per group, until it is reported."""

    transfer: KVTransfer
    held: list[list[int]]
    request: Request | None = None
    """Who waits for a load; None when nobody does any more."""
    hit: PrefixHit = field(default_factory=lambda: PrefixHit(0, ()))
    """Of a load: what the request has when it is complete."""
    since: float = 0.0
    state: JobState = JobState.SENT


@dataclass(slots=True)
class Answer:
    """Of the store to a waiting request."""

    since: float
    num_tokens: int | None = None
    """None: not known yet."""
    wait: bool = False
    num_local: int = 0
    """What the engine had itself when it was given: the store need not have that."""


@dataclass(slots=True)
class Outcome:
    """What reports mean for requests."""

    restart: list[Request] = field(default_factory=list)
    """They run on blocks that did not come: what they have in flight is void."""
    failed: list[tuple[Request, str]] = field(default_factory=list)
    """(request, reason): they are to end."""


class Outages:
    """One warning when something begins to fail, one line when everything works again."""

    def __init__(self) -> None:
        self._failing: set[str] = set()

    def failed(self, what: str, reason: str) -> None:
        if not self._failing:
            logger.warning(
                "the external KV store failed in a %s (%s); the engine goes on and computes what it cannot load",
                what,
                reason,
            )
        self._failing.add(what)

    def worked(self, what: str) -> None:
        if what in self._failing:
            self._failing.remove(what)
            if not self._failing:
                logger.info("the external KV store works again")


def free_blocks(job: Job, pools: Sequence[BlockPool]) -> None:
    """Give the job's references back, once."""
    for pool, block_ids in zip(pools, job.held, strict=True):
        pool.free(block_ids)
    job.held = [[] for _ in job.held]


def name_of(request: Request) -> str:
    """Of one choice, as the connector knows it."""
    return f"{request.request_id}#{request.choice_index}" if request.choice_index else request.request_id
