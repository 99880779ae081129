"""Writes down what a scheduler is told and what it decides, while it does.

Runs in the loop task; owns the names of the requests in the log.
"""

from __future__ import annotations

import hashlib
import secrets
import time
import zlib
from collections.abc import Mapping
from typing import Any

import msgspec

import infer
from infer.config.capture import ResolvedCapture
from infer.config.resolve import ResolvedCache
from infer.engine.kv_cache.manager import KVCacheManager
from infer.engine.request import Request, Status
from infer.engine.scheduler.budget import ScheduledStep
from infer.engine.scheduler.scheduler import Scheduler
from infer.engine.step import AuxPlan, StepResult
from infer.engine.step_log import records, snapshot
from infer.engine.step_log.log_file import LogFile
from infer.errors import EngineError
from infer.types import FinishReason

_encode = msgspec.msgpack.Encoder().encode


def watched(scheduler_class: type[Scheduler]) -> type[WatchedScheduler]:
    return type(f"Watched{scheduler_class.__name__}", (WatchedScheduler, scheduler_class), {})


def recorded(scheduler_class: type[Scheduler]) -> type[RecordedScheduler]:
    """The class with every call written down. Its instances need a `log` before the first call."""
    return type(f"Recorded{scheduler_class.__name__}", (RecordedScheduler, scheduler_class), {})


class WatchedScheduler(Scheduler):
    """Remembers whom a call cost its blocks, and whom it ended, until somebody takes the lists."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.preempted: list[Request] = []
        self.retired: list[Request] = []

    def _preempt(self, request: Request, *why: Any) -> None:
        self.preempted.append(request)
        super()._preempt(request, *why)

    def _retire(self, ended: list[Request]) -> None:
        self.retired += ended
        super()._retire(ended)


class RecordedScheduler(WatchedScheduler):
    """Everything that changes a scheduler comes through these methods; what they decide is not touched."""

    log: StepLog

    def add(self, request: Request) -> None:
        self.log.added(request)
        super().add(request)

    def finish(
        self,
        request: Request,
        reason: FinishReason,
        stop_reason: int | str | None = None,
        error: Exception | None = None,
    ) -> None:
        if request.status is not Status.FINISHED:
            self.log.ended(request, reason)
        super().finish(request, reason, stop_reason, error)
        self._forget_retired()

    def reset_prefix_cache(self, *, restart_running: bool = False) -> bool:
        done = super().reset_prefix_cache(restart_running=restart_running)
        self.log.write(records.Reset(restart_running, done))
        return done

    def commit_version(self, version: int) -> None:
        self.log.write(records.Version(version))
        super().commit_version(version)

    def schedule(self) -> ScheduledStep | None:
        self.log.go_on(self)
        self.preempted = []
        step = super().schedule()
        self.log.planned(step, self.preempted)
        return step

    def apply(self, result: StepResult) -> None:
        step = self._in_flight[0]
        lengths = [len(request.token_ids) for _, request, _ in step.outcomes()]
        super().apply(result)
        self.log.applied(step, result, lengths, self.retired)
        self._forget_retired()

    def fail(self, error: BaseException) -> None:
        step_id = self._in_flight[0].plan.step_id
        super().fail(error)
        self.log.write(records.Failed(step_id, type(error).__name__))
        self._forget_retired()

    def _forget_retired(self) -> None:
        for request in self.retired:
            self.log.forget(request)
        self.retired = []


class StepLog:
    """The log of one scheduler. Made before its first call, or between two."""

    def __init__(
        self,
        scheduler: Scheduler,
        file: LogFile,
        *,
        cache: ResolvedCache,
        capture: ResolvedCapture | None,
        token_ids: bool = False,
    ) -> None:
        self.keys: dict[Request, int] = {}
        """Names of the requests that have not ended."""
        self.file = file
        self._kv = scheduler.kv
        self._token_ids = token_ids
        self._num_hashes: dict[Request, int] = {}
        """Blocks whose hash was written."""
        self._next_key = 0
        self._secret = secrets.token_bytes(32)
        self._header = records.Header(
            format=records.FORMAT,
            infer_version=infer.__version__,
            created=time.time(),
            scheduler=scheduler.config,
            cache=cache,
            capture=None if capture is None else msgspec.structs.replace(capture, store_dir=None, run=b""),
            token_ids=token_ids,
        )
        file.append(_encode(self._header))

    def write(self, record: records.Record) -> None:
        self.file.append(_encode(record))

    def go_on(self, scheduler: Scheduler) -> None:
        """Begin the next file when this one has its size, or lost something: with the state as it is now."""
        lost = self.file.has_lost
        if not (self.file.is_full or lost) or self.file.failure is not None or self.file.is_behind:
            return
        header = msgspec.structs.replace(self._header, created=time.time(), continues=True, lost=lost)
        try:
            state = snapshot.take(scheduler, self.keys, self._digest)
        except EngineError as error:  # a scheduler of the user's keeps something else
            self.file.give_up(str(error))
            return
        self.file.begin([_encode(header), _encode(records.Snapshot(state))])

    # -- what came -----------------------------------------------------------------------------------------------

    def added(self, request: Request) -> None:
        self.write(records.Added([self._choice(choice) for choice in (request, *request.siblings)]))

    def _choice(self, request: Request) -> records.Choice:
        key = self.keys[request] = self._next_key
        self._next_key += 1
        sampling, rows = request.sampling, request.rows
        return records.Choice(
            key=key,
            request_id=request.request_id,
            choice_index=request.choice_index,
            prompt_len=request.prompt_len,
            max_tokens=request.max_tokens,
            priority=request.priority,
            arrival=request.arrival,
            min_tokens=sampling.min_tokens,
            num_forced=len(sampling.forced_token_ids),
            reads_prefix_cache=request.reads_prefix_cache,
            hashes=self._new_hashes(request),
            rows=None if rows is None else (rows.start, rows.fields),
            token_ids=list(request.token_ids) if self._token_ids else None,
        )

    def ended(self, request: Request, reason: str) -> None:
        self.write(records.Ended(self.keys[request], reason))

    def forget(self, request: Request) -> None:
        """The request is over."""
        del self.keys[request], self._num_hashes[request]

    # -- what was decided ----------------------------------------------------------------------------------------

    def planned(self, step: ScheduledStep | None, preempted: list[Request]) -> None:
        record = describe(step, self.keys, self._digest)
        record.preempted = [self.keys[request] for request in preempted]
        record.evicted = [self._digest(content) for content in evicted(self._kv)]
        self.write(record)

    def applied(self, step: ScheduledStep, result: StepResult, lengths: list[int], retired: list[Request]) -> None:
        """`lengths`: tokens of each sequence before the result was booked. `retired`: who ended with it."""
        record = records.Applied(step.plan.step_id)
        for (row, request, drawn), before in zip(step.outcomes(), lengths, strict=True):
            outcome = self._outcome(row, request, result, len(request.token_ids) - before)
            if outcome.num_ids != drawn or outcome != records.Outcome(row, outcome.num_ids, outcome.num_ids):
                record.outcomes.append(outcome)
        record.refused = [(name, self._digest(content), version) for name, content, version in result.aux_refused]
        record.finished = [self.keys[request] for request in retired]
        self.write(record)

    def _outcome(self, row: int, request: Request, result: StepResult, num_kept: int) -> records.Outcome:
        token_ids, piece = result.token_ids[row], result.aux.get(row)
        ended = bool(num_kept) and request.finish_reason is not None
        return records.Outcome(
            row,
            len(token_ids),
            num_kept,
            finish=(request.finish_reason or "") if ended else "",
            failed=row in result.errors,
            complete=row in result.complete,
            rows=None
            if piece is None
            else records.Rows(piece.start, piece.count, piece.num_cached, piece.versions, piece.error),
            hashes=self._new_hashes(request) if num_kept else [],
            token_ids=token_ids if self._token_ids else [],
            num_drafts=len(request.drafts) if num_kept else 0,
        )

    # -- content by other names ----------------------------------------------------------------------------------

    def _new_hashes(self, request: Request) -> list[bytes]:
        """Of the full blocks of known tokens that the log has not named yet."""
        known = self._num_hashes.get(request, 0)
        num_blocks = len(request.token_ids) // self._kv.block_size
        self._num_hashes[request] = num_blocks
        if num_blocks <= known:
            return []
        return [self._digest(content) for content in self._kv.hashes(request, num_blocks)[known:]]

    def _digest(self, content: bytes) -> bytes:
        """The log's name of a content: equal for equal ones, and of no use to find out what it was."""
        return hashlib.blake2b(content, key=self._secret, digest_size=8).digest()


def describe(step: ScheduledStep | None, keys: Mapping[Request, int], digest: snapshot.Digest) -> records.Planned:
    """A decision as the log has it, but for what it cost others."""
    if step is None:
        return records.Planned()
    plan = step.plan
    by_slot = {request.slot: request for request in (*step.requests, *step.forked)}
    starts = dict(zip(plan.slots, plan.starts, strict=True))
    return records.Planned(
        step_id=plan.step_id,
        keys=[keys[request] for request in step.requests],
        counts=plan.counts.tolist(),
        samples=plan.samples.tolist(),
        admissions=[
            records.Admission(
                keys[by_slot[one.slot]],
                one.slot,
                starts.get(one.slot, one.prompt_len),
                [list(t) for t in one.block_ids],
            )
            for one in plan.admissions
        ],
        new_blocks=plan.new_blocks,
        freed_slots=plan.freed_slots,
        forks=plan.forks,
        copies=plan.copies,
        drafts=plan.drafts,
        aux=0 if plan.aux is None else _checksum(plan.aux, digest),
    )


def evicted(kv: KVCacheManager) -> list[bytes]:
    """Contents that were overwritten since the last call. The pools must record events."""
    events = [event for pool in kv.pools for event in pool.take_events()]
    return [content for event in events if event.kind == "removed" for content in event.hashes]


def _checksum(plan: AuxPlan, digest: snapshot.Digest) -> int:
    named = msgspec.to_builtins(plan, builtin_types=(bytes,))
    return zlib.crc32(_encode(_renamed(named, digest))) or 1


def _renamed(value: object, digest: snapshot.Digest) -> object:
    if isinstance(value, bytes):
        return digest(value)
    if isinstance(value, dict):
        return [_renamed(item, digest) for item in value.values()]
    return [_renamed(item, digest) for item in value] if isinstance(value, list | tuple) else value
