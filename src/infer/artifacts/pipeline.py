"""Admits, encodes and delivers artifacts: a byte budget, a queue in order of expiry, a few slots, a receipt for each.

Runs on the engine's event loop; encoding runs on worker threads. Owns the task group of running deliveries.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import anyio
import anyio.abc
import anyio.to_thread

from infer.artifacts.admission import (
    KNOWN_CONTENTS,
    GenerationBounds,
    admit,
    check_request,
    longest_sequence,
    smallest_target,
)
from infer.artifacts.budget import ByteBudget
from infer.artifacts.capture import Capture
from infer.artifacts.destination import Destination, resolve_destination
from infer.artifacts.receipt import SENTENCES, ArtifactReceipt
from infer.artifacts.request import ArtifactRequest
from infer.artifacts.ticket import Ticket
from infer.artifacts.v2.admission import LOGPROBS, admit_v2, check_v2
from infer.artifacts.v2.capture import OpenCapture
from infer.artifacts.v2.limits import FORMAT as FORMAT_V2
from infer.config.artifacts import ArtifactsSection
from infer.errors import ArtifactError, ArtifactRefusedError, StorageError
from infer.plugins.registry import Registry

if TYPE_CHECKING:
    from infer.artifacts.generation import GenerationArtifact
    from infer.artifacts.v1.encoder import Encoded
    from infer.artifacts.v2.writer import EncodedV2

CLOSE_SECONDS = 5.0
_OPEN_FACTS = ("header_sha256", "header_bytes", "raw_bytes", "field_sha256")
"""Of a receipt, in the open format."""
_MOST_KINDS = 4
_NEVER = float("inf")
logger = logging.getLogger("infer.artifacts")


@dataclass(slots=True)
class PipelineStatistics:
    """Counters since the start, and what is held now."""

    admitted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """By code, before inference."""
    ready: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    """By code, in receipts."""
    delivered_bytes: int = 0
    encode_seconds: float = 0.0
    upload_seconds: float = 0.0
    queue_depth: int = 0
    running: int = 0
    reserved_bytes: int = 0


@dataclass(slots=True, eq=False)
class _Job:
    """One artifact on its way out."""

    ticket: Ticket
    source: Capture | OpenCapture | GenerationArtifact
    destination: Destination
    started: anyio.Event = field(default_factory=anyio.Event)
    done: anyio.Event = field(default_factory=anyio.Event)
    encoded: Encoded | EncodedV2 | None = None
    writing: bool = False
    receipt: ArtifactReceipt | None = None


class ArtifactPipeline:
    """One per engine, used as `async with`. Closing waits for running deliveries, at most the drain deadline."""

    def __init__(
        self, settings: ArtifactsSection, registry: Registry, *, clock: Callable[[], float] = time.time
    ) -> None:
        self.settings = settings
        self.statistics = PipelineStatistics()
        self._registry = registry
        self._clock = clock
        self._budget = ByteBudget(settings.process_bytes)
        self._queue: list[tuple[float, int, _Job]] = []
        self._order = itertools.count()
        self._tasks: anyio.abc.TaskGroup | None = None
        self._stack = AsyncExitStack()
        self._idle = anyio.Event()
        self._closing = False
        self._unit_seconds = 0.0

    async def __aenter__(self) -> Self:
        self._tasks = await self._stack.enter_async_context(anyio.create_task_group())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closing = True
        self._budget.close()
        try:
            if self.statistics.running or self._queue:
                with anyio.move_on_after(self.settings.drain_timeout_seconds):
                    await self._idle.wait()
        finally:
            self._stop()
            # An error of the block is the block's own: the task group would wrap it.
            await self._stack.__aexit__(None, None, None)

    def _stop(self) -> None:
        """What still waits is told so; what still runs is cancelled and says so itself."""
        waiting, self._queue = self._queue, []
        for _, _, job in waiting:
            self._settle(job, "artifact_cancelled")
        if self._tasks is not None:
            self._tasks.cancel_scope.cancel()

    async def admit(self, request: ArtifactRequest, bounds: GenerationBounds) -> Ticket:
        """Every check before inference, then room in the byte budget. Raises `ArtifactRefusedError`; nothing is held
        then. The caller must `release` the ticket."""
        try:
            if self._closing or self._tasks is None:
                raise ArtifactRefusedError("artifacts are closed", code="artifact_capacity_exhausted", retry_after=1.0)
            is_open = request.format == FORMAT_V2
            (check_v2 if is_open else check_request)(request, bounds)
            destination = resolve_destination(request, self.settings, self._registry)
            if is_open:
                admitted = admit_v2(request, bounds, self.settings.v2_max_decoded_bytes, destination.max_bytes)
            else:
                admitted = admit(request, bounds, self.settings.max_decoded_bytes, destination.max_bytes)
            self._check_expiry(request, bounds, destination)
            await self.reserve(admitted.reserved_bytes)
        except ArtifactRefusedError as error:
            self.statistics.refused[error.code] += 1
            raise
        self.statistics.admitted += 1
        return Ticket(self, request, bounds, admitted, destination)

    def limits(self, bounds: GenerationBounds | None = None) -> dict[str, int]:
        """What is in force, for server information."""
        section = self.settings
        shown = {
            "max_decoded_bytes": section.max_decoded_bytes,
            "max_managed_bytes": section.max_bytes,
            "v2_max_decoded_bytes": section.v2_max_decoded_bytes,
            "v2_max_managed_bytes": section.v2_max_bytes,
            "process_bytes": section.process_bytes,
            "smallest_target_bytes": smallest_target(),
        }
        if bounds is not None:
            contents = KNOWN_CONTENTS if bounds.router_layout else KNOWN_CONTENTS[1:]
            shown["longest_sequence"] = longest_sequence(contents, bounds, section.max_decoded_bytes)
        return shown

    def give_back(self, amount: int) -> None:
        self._budget.release(amount)
        self.statistics.reserved_bytes = self._budget.reserved

    def fail(
        self,
        ticket: Ticket,
        code: str,
        encoded: Encoded | EncodedV2 | None = None,
        object_id: str = "",
        cause: str = "",
    ) -> ArtifactReceipt:
        """A failed receipt, counted. `cause` goes to the log only."""
        if code not in SENTENCES:  # a target of someone else's may raise any code
            code = "artifact_delivery_failed"
        self.statistics.failed[code] += 1
        logger.warning("artifact of request %s: %s%s", ticket.bounds.request_id, code, cause and f" ({cause})")
        receipt = _receipt(ticket, "failed", encoded, object_id)
        return replace(receipt, error_code=code)

    async def deliver(self, ticket: Ticket, source: Capture | OpenCapture | GenerationArtifact) -> ArtifactReceipt:
        """Wait for a slot, then run to the end whatever becomes of the caller."""
        if self._closing:
            return self.fail(ticket, "artifact_cancelled")
        if (
            self.statistics.running >= self.settings.pipeline_concurrency
            and len(self._queue) >= self.settings.queue_limit
        ):
            return self.fail(ticket, "artifact_queue_timeout")
        job = _Job(ticket, source, ticket.destination)
        expiry = ticket.destination.expires_at
        heapq.heappush(self._queue, (_NEVER if expiry is None else expiry, next(self._order), job))
        self._start_waiting()
        try:
            with anyio.move_on_after(self.settings.queue_timeout_seconds):
                await job.started.wait()
            if not job.started.is_set():
                self._withdraw(job)
                return self.fail(ticket, "artifact_queue_timeout")
            await job.done.wait()
        except BaseException:
            if not job.started.is_set():
                self._withdraw(job)
                self.fail(ticket, "artifact_cancelled")
                ticket.release()
            raise
        return job.receipt or self.fail(ticket, "artifact_delivery_failed")

    def _check_expiry(self, request: ArtifactRequest, bounds: GenerationBounds, destination: Destination) -> None:
        if destination.expires_at is None or request.refresh is not None:
            return
        waiting = len(self._queue) / self.settings.pipeline_concurrency * self._unit_seconds
        needed = waiting + bounds.expected_seconds + self.settings.expiry_margin_seconds
        if destination.expires_at < self._clock() + needed:
            raise ArtifactRefusedError(
                f"the upload grant must be valid for {needed:.0f} more seconds: queueing, generation and upload",
                code="artifact_target_expires_too_soon",
            )

    async def reserve(self, amount: int) -> None:
        """Room for bytes that a request may hold, to be given back. Waits; raises `ArtifactRefusedError`."""
        if amount > self._budget.total:
            raise ArtifactRefusedError(
                f"the request may hold {amount} bytes; artifacts.process_bytes is {self._budget.total}",
                code="artifact_limit_exceeded",
            )
        if not await self._budget.acquire(amount, self.settings.queue_timeout_seconds):
            raise ArtifactRefusedError(
                SENTENCES["artifact_capacity_exhausted"],
                code="artifact_capacity_exhausted",
                retry_after=max(1.0, self._unit_seconds),
            )
        self.statistics.reserved_bytes = self._budget.reserved

    def _withdraw(self, job: _Job) -> None:
        self._queue = [entry for entry in self._queue if entry[2] is not job]
        heapq.heapify(self._queue)
        self._note_depth()

    def _start_waiting(self) -> None:
        while self._queue and self._tasks is not None and self.statistics.running < self.settings.pipeline_concurrency:
            job = heapq.heappop(self._queue)[2]
            self.statistics.running += 1
            job.ticket.delivering = True
            job.started.set()
            self._tasks.start_soon(self._run, job)
        self._note_depth()

    def _note_depth(self) -> None:
        self.statistics.queue_depth = len(self._queue)
        if not self._queue and not self.statistics.running:
            self._idle.set()
            self._idle = anyio.Event()

    async def _run(self, job: _Job) -> None:
        """One unit: it keeps its slot until it has ended."""
        begun = time.monotonic()
        try:
            job.receipt = await self._encode_and_put(job)
        finally:
            if job.receipt is None:  # cancelled at shutdown
                self._settle(job, "artifact_outcome_unknown" if job.writing else "artifact_cancelled")
            self._unit_seconds += (time.monotonic() - begun - self._unit_seconds) / 4
            self.statistics.running -= 1
            job.ticket.delivering = False
            job.done.set()
            job.ticket.release()
            self._start_waiting()

    def _settle(self, job: _Job, code: str) -> None:
        job.receipt = self.fail(job.ticket, code, job.encoded, job.destination.object_id)
        job.started.set()
        job.done.set()

    async def _encode_and_put(self, job: _Job) -> ArtifactReceipt:
        code = cause = ""
        try:
            job.encoded = await self._encode(job)
            if len(job.encoded.data) > job.destination.max_bytes:
                raise ArtifactError("larger than the target allows", code="artifact_too_large")
            await self._refresh(job)
            await self._put(job, job.encoded.data)
        except Exception as error:
            code = error.code if isinstance(error, ArtifactError | StorageError) else "artifact_delivery_failed"
            cause = _kinds(error)
        finally:
            await self._close(job.destination)
        # A sink names the object only when it has it.
        object_id = str(getattr(job.destination.target, "object_id", job.destination.object_id))
        if code:
            return self.fail(job.ticket, code, job.encoded, object_id, cause)
        self.statistics.ready += 1
        return _receipt(job.ticket, "ready", job.encoded, object_id)

    async def _encode(self, job: _Job) -> Encoded | EncodedV2:
        from infer.artifacts.assembly import encode_open, encode_source  # noqa: PLC0415  numpy, with the first artifact

        begun, source = time.monotonic(), job.source
        try:
            if job.ticket.is_open and not isinstance(source, Capture):
                request, bounds, most = job.ticket.request, job.ticket.bounds, self.settings.v2_max_decoded_bytes
                return await anyio.to_thread.run_sync(encode_open, source, request, bounds, most)
            if isinstance(source, OpenCapture):
                raise ArtifactError("a capture of the other format", code="artifact_capture_failed")
            return await anyio.to_thread.run_sync(encode_source, source, self.settings.max_decoded_bytes)
        finally:
            self.statistics.encode_seconds += time.monotonic() - begun

    async def _put(self, job: _Job, data: bytes) -> None:
        job.writing = True
        begun = time.monotonic()
        try:
            with anyio.fail_after(job.destination.seconds):
                await job.destination.target.put(data, if_absent=True)
        except TimeoutError:  # of ours, or the target's own that came out as it was
            raise ArtifactError("the write was given up", code="artifact_outcome_unknown") from None
        finally:
            self.statistics.upload_seconds += time.monotonic() - begun
        self.statistics.delivered_bytes += len(data)

    async def _refresh(self, job: _Job) -> None:
        """A new grant in place of an expired one, where the caller can supply it."""
        refresh, expires = job.ticket.request.refresh, job.destination.expires_at
        if refresh is None or expires is None or expires > self._clock():
            return
        try:
            with anyio.fail_after(self.settings.presigned_timeout_seconds):
                request = replace(job.ticket.request, target=await refresh())
        except TimeoutError:
            raise ArtifactError("no new grant came in time", code="artifact_target_expired") from None
        await self._close(job.destination)
        try:
            job.destination = resolve_destination(request, self.settings, self._registry)
        except ArtifactRefusedError:
            raise ArtifactError("the new grant is not allowed", code="artifact_target_expired") from None

    async def _close(self, destination: Destination) -> None:
        with anyio.move_on_after(CLOSE_SECONDS, shield=True):
            try:
                await destination.target.aclose()
            except Exception as error:
                logger.warning("closing an artifact target failed: %s", type(error).__name__)


def _kinds(error: BaseException | None) -> str:
    """Types of an error and of what it came from: enough to find a server that is down, and no text of a provider's."""
    names: list[str] = []
    while error is not None and len(names) < _MOST_KINDS:
        names.append(type(error).__name__)
        error = error.__cause__ or error.__context__
    return " after ".join(names)


def _receipt(ticket: Ticket, state: Any, encoded: Encoded | EncodedV2 | None, object_id: str) -> ArtifactReceipt:
    request, bounds = ticket.request, ticket.bounds
    receipt = ArtifactReceipt(format=request.format, contents=tuple(sorted(request.contents)), state=state)
    if encoded is None:
        return receipt
    counts = encoded.completion_counts
    return replace(
        receipt,
        actual_bytes=len(encoded.data),
        sha256=encoded.sha256,
        object_id=object_id,
        body_sha256=encoded.body_sha256,
        completion_token_count=counts[0] if len(counts) == 1 else counts,
        token_start=bounds.route_start if {"moe_routes", *bounds.captured} & set(request.contents) else None,
        logprobs_mode=bounds.logprobs_mode if set(LOGPROBS) & set(request.contents) else None,
        **{name: getattr(encoded, name) for name in _OPEN_FACTS if hasattr(encoded, name)},
    )
