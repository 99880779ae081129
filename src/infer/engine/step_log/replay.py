"""Makes every decision of a step log again, with a new scheduler and no model, and compares.

Runs anywhere, synchronously; owns the scheduler that it drives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import msgspec
import zstandard

from infer.engine.aux.rows import RequestRows
from infer.engine.history import History
from infer.engine.kv_cache.manager import KVCacheManager
from infer.engine.request import Request
from infer.engine.scheduler.budget import ScheduledStep
from infer.engine.scheduler.scheduler import Scheduler
from infer.engine.step import AuxRows, SamplingSpec, StepResult
from infer.engine.step_log import records, snapshot
from infer.engine.step_log.recording import describe, evicted, watched
from infer.errors import StepLogError

MAX_RECORD_BYTES = 2**28
MAX_SIZE = 2**22
"""Of anything that a scheduler is made of."""
_STOP, _LOOP = -2, -3
"""Token ids that stand for one that ended its sequence."""

_decoder = msgspec.msgpack.Decoder(records.Record)


def read_records(path: str | Path) -> Iterator[records.Record]:
    """The records of a file, header first. A file that was cut off (its engine was killed) ends where its last whole record
    does. Raises `StepLogError` for what is no step log, is damaged, or was written in another format."""
    first = True
    for data in _records(Path(path)):
        try:
            record = _decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise StepLogError(f"{path} is not a step log of format {records.FORMAT}: {error}") from error
        if first:
            if not isinstance(record, records.Header) or record.magic != records.MAGIC:
                raise StepLogError(f"{path} is not a step log: it does not begin with a header")
            if record.format != records.FORMAT:
                raise StepLogError(
                    f"{path} has format {record.format} (infer {record.infer_version}); this infer reads {records.FORMAT}"
                )
            _check_sizes(path, record)
            first = False
        yield record
    if first:
        raise StepLogError(f"{path} is not a step log: it holds no record")


def _check_sizes(path: str | Path, header: records.Header) -> None:
    """A scheduler of these sizes is to be made, whoever wrote the file."""
    sizes = [header.scheduler.max_num_seqs, header.scheduler.max_num_batched_tokens, header.cache.block_size]
    sizes += [group.num_blocks for group in header.cache.groups]
    sizes += [] if header.capture is None else header.capture.num_objects.values()
    if not all(0 < size <= MAX_SIZE for size in sizes) or not 0 < header.scheduler.max_model_len <= MAX_SIZE:
        raise StepLogError(f"{path} is damaged: sizes from {min(sizes)} to {max(sizes)} are not those of an engine")


def _records(path: Path) -> Iterator[bytes]:
    buffer = bytearray()
    try:
        with path.open("rb") as file:
            reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
            while piece := reader.read(2**16):
                buffer += piece
                at = 0
                while len(buffer) - at >= 4:
                    size = int.from_bytes(buffer[at : at + 4], "little")
                    if size > MAX_RECORD_BYTES:
                        raise StepLogError(f"{path} is damaged: a record says that it has {size} bytes")
                    if len(buffer) - at - 4 < size:
                        break
                    yield bytes(buffer[at + 4 : at + 4 + size])
                    at += 4 + size
                del buffer[:at]
    except zstandard.ZstdError as error:
        raise StepLogError(f"{path} is damaged or no step log: {error}") from error
    except OSError as error:
        raise StepLogError(f"{path} cannot be read: {error.strerror or error}") from error


@dataclass(slots=True)
class Difference:
    """Where the replay went another way."""

    step_id: int | None
    what: str
    recorded: object
    replayed: object

    def __str__(self) -> str:
        at = "a call that planned nothing" if self.step_id is None else f"step {self.step_id}"
        return f"{at}: {self.what} was {self.recorded} in the log and is {self.replayed} here"


@dataclass(slots=True)
class ReplayReport:
    steps: int = 0
    requests: int = 0
    preemptions: int = 0
    evictions: int = 0
    differences: list[Difference] = field(default_factory=list)
    """At most one: what follows the first has no meaning."""
    lost: bool = False
    """Records in front of this file are missing."""

    @property
    def matches(self) -> bool:
        return not self.differences


class Replay:
    """One file. `step` takes records one by one; `scheduler` may be looked at between them."""

    def __init__(self, header: records.Header, scheduler_class: type[Scheduler] = Scheduler) -> None:
        self.report = ReplayReport(lost=header.lost)
        self.header = header
        self.kv = KVCacheManager(header.cache, "replay", record_events=True)
        self.kv.lineage.tokens_known = header.token_ids
        self.scheduler = watched(scheduler_class)(header.scheduler, self.kv, capture=header.capture, clock=lambda: 0.0)
        self.requests: dict[int, Request] = {}
        """By their names in the log; those that ended stay."""
        self._keys: dict[Request, int] = {}
        self._in_flight: list[ScheduledStep] = []

    def step(self, record: records.Record) -> None:
        """Do what the record says was done; decisions are compared."""
        scheduler = self.scheduler
        scheduler.preempted, scheduler.retired = [], []
        match record:
            case records.Snapshot(state):
                self._restore(state)
            case records.Added(choices):
                self._add(choices)
            case records.Ended(key, reason):
                scheduler.finish(self.requests[key], reason)  # type: ignore[arg-type]
            case records.Reset(restart_running, done):
                again = scheduler.reset_prefix_cache(restart_running=restart_running)
                self._compare(None, "whether the prefix cache was reset", done, again)
            case records.Version(version):
                scheduler.commit_version(version)
            case records.Planned():
                self._plan(record)
            case records.Applied():
                self._apply(record)
            case records.Failed(step_id, error):
                self._compare(step_id, "the step that failed", step_id, self._in_flight.pop(0).plan.step_id)
                scheduler.fail(RuntimeError(error))
            case records.Header():
                pass
        self.report.preemptions = scheduler.stats.preemptions

    def _add(self, choices: list[records.Choice]) -> None:
        requests = [self._request(choice) for choice in choices]
        for choice, request in zip(choices, requests, strict=True):
            self.requests[choice.key], self._keys[request] = request, choice.key
        first, *others = requests
        first.siblings = tuple(others)
        first.rows = self._rows(choices[0])
        if first.rows is not None:
            for other in others:
                other.rows = first.rows.sibling()
        self.report.requests += len(requests)
        self.scheduler.add(first)

    def _request(self, choice: records.Choice) -> Request:
        if not 0 < choice.prompt_len <= self.header.scheduler.max_model_len:
            raise ValueError(f"a prompt of {choice.prompt_len} tokens")
        request = Request(
            request_id=choice.request_id,
            choice_index=choice.choice_index,
            prompt_ids=choice.token_ids or [0] * choice.prompt_len,
            sampling=SamplingSpec(
                seed=0,
                min_tokens=choice.min_tokens,
                prompt_logprobs=None if choice.reads_prefix_cache else 0,
                forced_token_ids=(0,) * choice.num_forced,
            ),
            max_tokens=choice.max_tokens,
            stop_ids={},
            outbox=snapshot.NoReader(),  # type: ignore[arg-type]
            priority=choice.priority,
            arrival=choice.arrival,
        )
        _end_as_told(request)
        request.blocks.hashes = list(choice.hashes)
        return request

    def _rows(self, choice: records.Choice) -> RequestRows | None:
        if choice.rows is None or self.header.capture is None:
            return None
        start, fields = choice.rows
        profiles = [profile for name in fields if (profile := self.header.capture.profile(name)) is not None]
        return RequestRows(profiles, prompt_len=choice.prompt_len, max_tokens=choice.max_tokens, start=start)

    def _plan(self, record: records.Planned) -> None:
        scheduler = self.scheduler
        step = scheduler.schedule()
        again = describe(step, self._keys, lambda content: content)
        again.preempted = [self._keys[request] for request in scheduler.preempted]
        again.evicted = evicted(self.kv)
        if step is not None:
            self._in_flight.append(step)
        self.report.steps += step is not None
        self.report.evictions += len(again.evicted)
        for name in records.Planned.__struct_fields__:
            self._compare(record.step_id, name, getattr(record, name), getattr(again, name))

    def _apply(self, record: records.Applied) -> None:
        step = self._in_flight.pop(0)
        told = {outcome.row: outcome for outcome in record.outcomes}
        result = StepResult(step_id=step.plan.step_id, token_ids=[], logprobs=[], aux_refused=record.refused)
        for row, request, drawn in step.outcomes():
            outcome = told.get(row) or records.Outcome(row, drawn, drawn)
            self._fill(result, request, outcome)
        scheduler = self.scheduler
        scheduler.apply(result)
        ended = [self._keys[request] for request in scheduler.retired]
        self._compare(record.step_id, "who ended", record.finished, ended)

    def _fill(self, result: StepResult, request: Request, outcome: records.Outcome) -> None:
        """One row of a result, with token ids that end the sequence where the real ones did."""
        row, token_ids = outcome.row, [0] * outcome.num_ids
        if outcome.num_kept and outcome.finish == "stop" and not outcome.complete:
            token_ids[outcome.num_kept - 1] = _STOP
        elif outcome.num_kept and outcome.finish == "repetition":
            token_ids[outcome.num_kept - 1] = _LOOP
        result.token_ids.append(token_ids)
        result.logprobs.append(None)
        request.blocks.hashes += outcome.hashes
        if outcome.failed:
            result.errors[row] = "it failed"
        if outcome.complete:
            result.complete.add(row)
        if outcome.num_drafts:
            result.drafts[row] = [0] * outcome.num_drafts
        if outcome.rows is not None and request.rows is not None:
            rows = outcome.rows
            data = {profile.name: bytes(rows.count * profile.row_bytes) for profile in request.rows.profiles}
            result.aux[row] = AuxRows(rows.start, rows.count, rows.num_cached, data, rows.versions, rows.error)

    def _restore(self, state: msgspec.Raw) -> None:
        self.requests = snapshot.restore(self.scheduler, state)
        self._keys = {request: key for key, request in self.requests.items()}
        self._in_flight = list(self.scheduler._in_flight)
        for request in self.requests.values():
            _end_as_told(request)
            request.history = History(request.choice_index)
            self.scheduler.histories.begin([request], -1)

    def _compare(self, step_id: int | None, what: str, recorded: object, replayed: object) -> None:
        if recorded != replayed and not self.report.differences:
            self.report.differences.append(Difference(step_id, what, recorded, replayed))


class _Looping:
    """Stands for the repetition detector of a request: the log says where it found something."""

    def feed(self, token_id: int) -> bool:
        return token_id == _LOOP


def _end_as_told(request: Request) -> None:
    request.stop_ids = {_STOP: None}
    request.repetition = _Looping()  # type: ignore[assignment]


def replayed(path: str | Path, scheduler_class: type[Scheduler] = Scheduler) -> Iterator[Replay]:
    """The replay of a file, after each record, up to the first decision that comes out differently. Raises `StepLogError` for
    a file that cannot be read, or records that contradict each other."""
    run: Replay | None = None
    for record in read_records(path):
        if run is None or isinstance(record, records.Header):
            run = Replay(cast(records.Header, record), scheduler_class)
        try:
            run.step(record)
        except Exception as error:  # whatever a record leads to that cannot follow from the ones before it
            raise StepLogError(
                f"{path} contradicts itself at a {type(record).__name__} record behind step {run.report.steps}: "
                f"{type(error).__name__}: {error}"
            ) from error
        yield run
        if not run.report.matches:
            break


def replay(path: str | Path, scheduler_class: type[Scheduler] = Scheduler) -> ReplayReport:
    """Make every decision of a file again; raises like `replayed`."""
    report = ReplayReport()
    for run in replayed(path, scheduler_class):
        report = run.report
    return report
