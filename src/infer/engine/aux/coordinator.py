"""Captured rows as the scheduler sees them: who captures, which hashes the worker learns, what may shorten a prefix hit.

Runs in the loop task; owns the live captures and the auxiliary side of the next plan.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from infer.engine.aux.index import Key, RetainedObject, RetainedObjects
from infer.engine.step import AuxBegin, AuxPlan

if TYPE_CHECKING:
    from infer.config.capture import ResolvedCapture
    from infer.engine.aux.rows import RequestRows
    from infer.engine.kv_cache.manager import KVCacheManager, PrefixHit
    from infer.engine.request import Request
    from infer.engine.scheduler.budget import ScheduledStep
    from infer.engine.step import StepResult

logger = logging.getLogger(__name__)


def cap_external_hit(num_local: int, num_external: int, cap: int, block_size: int) -> int:
    """Tokens that an external hit counts behind a local one: all of them, or none when the total is no whole number of
    blocks or is more than `cap` tokens, whose rows exist."""
    total = num_local + num_external
    return num_external if total % block_size == 0 and total <= cap else 0


@dataclass(slots=True, eq=False)
class _Capture:
    """One stay of a request in a slot, while its rows are captured."""

    capture_id: int
    request: Request
    fields: tuple[str, ...]
    weight_version: int
    num_sent: int
    """Blocks whose hash the worker has."""
    max_blocks: int | None = None
    """Blocks computed under one weight version from the first on, once that has changed: no later one is shared."""
    trusted: bool = True
    pinned: list[RetainedObject] = field(default_factory=list)
    """In the order of blocks."""
    published: list[Key] = field(default_factory=list)
    """Objects that come from this capture and nobody before."""


@dataclass(slots=True)
class AuxStats:
    """Counters since start."""

    captures: int = 0
    rows: int = 0
    """Delivered to requests."""
    failures: int = 0
    """Requests whose rows failed."""
    uniform_blocks: int = 0
    """Captured blocks whose cells are all equal: a sign of a broken router."""


class AuxCoordinator:
    """Follows the requests that asked for rows through the scheduler.

    A request starts with `began` and leaves with `ended`, before its blocks are released; in between `computed` makes
    its full blocks shareable. `end_step` gives what the plan carries, `accept` books what came back.
    """

    def __init__(self, config: ResolvedCapture, kv: KVCacheManager) -> None:
        self.stats = AuxStats()
        self.weight_version = 0
        self.retained = RetainedObjects(config.num_objects, kv.is_cached)
        self._kv = kv
        self._block_size = config.block_size
        self._live: dict[int, _Capture] = {}
        self._next_id = 0
        self._begins: list[AuxBegin] = []
        self._hashes: list[tuple[int, list[bytes]]] = []
        self._ends: list[tuple[int, list[bytes]]] = []
        self._published: list[Key] = []

    @property
    def num_live(self) -> int:
        return len(self._live)

    def commit_version(self, version: int) -> None:
        """Steps planned from now on run on other weights. Objects of the old ones stay, under their own key."""
        if version == self.weight_version:
            return
        self.weight_version = self.retained.weight_version = version
        for capture in self._live.values():
            if capture.max_blocks is None:
                capture.max_blocks = capture.request.num_computed // self._block_size

    # -- admission -----------------------------------------------------------------------------------------------

    def match(self, request: Request) -> PrefixHit:
        """The prefix hit of a request, as far as the rows that it still needs survive."""
        rows = request.rows
        if rows is None or rows.failure is not None:
            return self._kv.match(request)
        return self._kv.match(request, self.cap_hit(rows, self._kv.matchable_hashes(request)))

    def cap_hit(self, rows: RequestRows, hashes: Sequence[bytes]) -> int:
        """Most blocks of a prefix hit: up to the first whose rows are needed and gone. What lies in front of the first
        row that is needed does not count."""
        for block in range(rows.cursor // self._block_size, len(hashes)):
            if any((name, hashes[block], self.weight_version) not in self.retained for name in rows.fields):
                return block
        return len(hashes)

    def began(self, request: Request, parent: Request | None = None) -> None:
        """The request holds a slot and `num_computed` tokens; with `parent`, they are that request's prompt."""
        rows = request.rows
        if rows is None or rows.failure is not None:
            return
        source = None if parent is None else self._live.get(parent.capture_id)
        if parent is not None and source is None:
            self._fail(request, rows, "the shared prompt was computed without capture")
            return
        start = request.num_computed
        emit_from = rows.cursor if parent is None else max(rows.cursor, start)
        num_blocks = start // self._block_size
        capture = _Capture(self._next_id, request, rows.fields, self.weight_version, num_blocks)
        hashes = self._kv.hashes(request, num_blocks)
        if source is not None:
            capture.weight_version, capture.max_blocks = source.weight_version, source.max_blocks
        for block_hash in hashes[emit_from // self._block_size :]:
            for name in rows.fields:
                if (pinned := self.retained.pin((name, block_hash, capture.weight_version))) is not None:
                    capture.pinned.append(pinned)
        self._next_id += 1
        self._live[capture.capture_id] = capture
        request.capture_id = capture.capture_id
        rows.recomputed_until = rows.computed_until
        self.stats.captures += 1
        self._begins.append(
            AuxBegin(
                capture_id=capture.capture_id,
                slot=request.slot,
                fields=rows.fields,
                start=start,
                emit_from=emit_from,
                hashes=hashes,
                parent=None if source is None else source.capture_id,
            )
        )

    # -- while it runs -------------------------------------------------------------------------------------------

    def computed(self, request: Request) -> None:
        """The request's positions up to `num_computed` are computed by the plans handed out so far."""
        capture = self._live.get(request.capture_id)
        if capture is not None and (hashes := self._next_hashes(capture)):
            self._hashes.append((capture.capture_id, hashes))

    def end_step(self, step_id: int) -> tuple[AuxPlan | None, list[Key]]:
        """What the plan carries, and the objects that come into being with it, should its step fail."""
        size = self._block_size
        for capture in self._live.values():
            if capture.request.num_computed >= (capture.num_sent + 1) * size:
                self.computed(capture.request)  # a hash can become known after its block was computed
        self.retained.step_id = step_id + 1
        if not (self._live or self._ends or self.retained.has_changes()):
            return None, []
        retain, release, discard = self.retained.take_changes()
        plan = AuxPlan(self.weight_version, self._ends, self._begins, self._hashes, retain, release, discard)
        published = self._published
        self._ends, self._begins, self._hashes, self._published = [], [], [], []
        return plan, published

    def ended(self, request: Request, *, failed: bool = False) -> None:
        """The request gives up its slot, its blocks not released yet. Its objects stay as long as the blocks can be hit;
        after a failure nobody may find them."""
        capture = self._live.pop(request.capture_id, None)
        request.capture_id = -1
        if capture is None:
            return
        if request.rows is not None:
            request.rows.computed_until = max(request.rows.computed_until, request.num_computed)
        capture.trusted = capture.trusted and not failed
        self._ends.append((capture.capture_id, self._next_hashes(capture)))
        self._let_go(capture)

    # -- what comes back -----------------------------------------------------------------------------------------

    def accept(self, request: Request, index: int, step: ScheduledStep, result: StepResult) -> None:
        """Book the rows that came with the tokens just accepted."""
        rows = request.rows
        if rows is None or rows.failure is not None:
            return
        held = rows.cursor
        num_rows = len(step.requests)
        if index >= num_rows:
            rows.accept_prompt(result.aux.get(step.plan.forks[index - num_rows][0]))
        rows.accept(result.aux.get(index), len(request.token_ids))
        self.stats.rows += rows.cursor - held
        if rows.failure is not None:
            self._fail(request, rows, rows.failure)

    def applied(self, result: StepResult) -> None:
        """What a step says of objects, whoever's they are."""
        self.stats.uniform_blocks += result.aux_uniform_blocks
        for key in result.aux_refused:
            self.retained.missing(key, result.step_id)

    def failed(self, published: Iterable[Key]) -> None:
        """A step failed: what it and later ones brought, and what has ended since, cannot be trusted."""
        self.retained.discard([*published, *self._published])
        self._published = []
        self._ends = [(capture_id, []) for capture_id, _ in self._ends]

    # -- parts ---------------------------------------------------------------------------------------------------

    def _next_hashes(self, capture: _Capture) -> list[bytes]:
        """Hashes of full blocks of known tokens that the worker does not have yet; their objects become shareable."""
        request = capture.request
        size = self._block_size
        if request.num_computed < (capture.num_sent + 1) * size:
            return []
        num_blocks = min(request.num_computed, len(request.token_ids)) // size
        if capture.max_blocks is not None:
            num_blocks = min(num_blocks, capture.max_blocks)
        if num_blocks <= capture.num_sent or not capture.trusted:
            return []
        hashes = self._kv.hashes(request, num_blocks)[capture.num_sent :]
        capture.num_sent = num_blocks
        for block_hash in hashes:
            for name in capture.fields:
                key = (name, block_hash, capture.weight_version)
                if key not in self.retained:
                    capture.published.append(key)
                    self._published.append(key)
                if (pinned := self.retained.publish(key)) is not None:
                    capture.pinned.append(pinned)
        return hashes

    def _let_go(self, capture: _Capture) -> None:
        """Last block first, so that a sequence's tail dies first."""
        for pinned in reversed(capture.pinned):
            self.retained.unpin(pinned)
        capture.pinned = []
        if not capture.trusted:
            self.retained.discard(capture.published, even_pinned=False)
            capture.published = []

    def _fail(self, request: Request, rows: RequestRows, reason: str) -> None:
        """The request's rows are lost; its tokens go on, and nobody is given an object that may be the cause."""
        rows.fail(reason)
        self.stats.failures += 1
        logger.warning("captured rows of request %r failed: %s", request.request_id, reason)
        capture = self._live.get(request.capture_id)
        if capture is not None:
            capture.trusted = False
            capture.published += [pinned.key for pinned in capture.pinned]
            self._let_go(capture)
