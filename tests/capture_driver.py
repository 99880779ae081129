"""Captured rows without tensors: a worker half of dictionaries that obeys `step.AuxPlan` to the letter and checks it, and a
step driver that asks for rows. A row is a digest of all tokens up to it and of the weight version: a wrong one shows."""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from infer.config.capture import CaptureProfile, ResolvedCapture
from infer.config.resolve import ResolvedCache
from infer.engine.aux.coordinator import AuxCoordinator
from infer.engine.aux.rows import RequestRows
from infer.engine.request import Request
from infer.engine.scheduler.budget import ScheduledStep
from infer.engine.scheduler.scheduler import Scheduler
from infer.engine.step import AuxBegin, AuxPlan, AuxRows, StepPlan, StepResult
from infer.testing.fake_executor import FakeWorker
from infer.types import CapturedRows
from step_driver import PlannedFailure, StepDriver, cache_config, full_group

ROUTES = CaptureProfile(name="moe_routes", dtype="uint8", row_shape=(2, 2), layer_ids=(0, 1), num_experts=256)
HIDDEN = CaptureProfile(name="hidden_states", dtype="float32", row_shape=(1, 2))
PROFILES = (ROUTES, HIDDEN)
Key = tuple[str, bytes, int]


class ContractError(AssertionError):
    """The plan broke a promise of `AuxPlan`."""


@cache
def prefix_digest(token_ids: tuple[int, ...]) -> bytes:
    return hashlib.blake2b(repr(token_ids).encode(), digest_size=16).digest()


def row(profile: CaptureProfile, token_ids: Sequence[int], version: int) -> bytes:
    """What the model computes for the last of these tokens."""
    seed = f"{profile.name}:{version}:".encode() + prefix_digest(tuple(token_ids))
    return hashlib.blake2b(seed, digest_size=profile.row_bytes).digest()


def expected_data(out: CapturedRows, profile: CaptureProfile, token_ids: Sequence[int]) -> bytes:
    """The rows that belong to these tokens, under the versions that the rows say."""
    versions = [version for rows, version in out.versions for _ in range(rows)]
    positions = range(out.start, out.start + out.count)
    return b"".join(row(profile, token_ids[: p + 1], v) for p, v in zip(positions, versions, strict=True))


class ModelStore:
    """Objects of one field: a dictionary with a hard cap."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.data: OrderedDict[Key, bytes] = OrderedDict()
        self.retained: set[Key] = set()

    def batch(self, puts: dict[Key, bytes], retain: list[Key], release: list[Key], discard: list[Key]) -> list[Key]:
        held = set(self.retained) & set(self.data) - set(discard)
        for key in discard:
            self.data.pop(key, None)
        for key in retain:
            if key in self.retained:
                raise ContractError(f"{key} is retained twice")
            self.retained.add(key)
        for key in release:
            if key not in self.retained:
                raise ContractError(f"{key} is released and was not retained")
            self.retained.remove(key)
            if key in self.data:
                self.data.move_to_end(key)
        if len(self.retained) > self.capacity:
            raise ContractError(f"{len(self.retained)} objects are to be kept and {self.capacity} fit")
        spared = set(puts) - set(release)
        return [key for key, data in puts.items() if key not in held and not self._put(key, data, spared)]

    def _put(self, key: Key, data: bytes, spared: set[Key]) -> bool:
        if key not in self.data and len(self.data) >= self.capacity:
            victim = next((old for old in self.data if old not in self.retained and old not in spared), None)
            if victim is None and key in self.retained:
                victim = next((old for old in self.data if old not in self.retained), None)
                if victim is None:
                    raise ContractError(f"no room for {key}, which is to be kept")
            if victim is None:
                return False
            del self.data[victim]
        self.data[key] = data
        self.data.move_to_end(key)
        return True


@dataclass
class ModelCapture:
    begin: AuxBegin
    version: int
    """Under which its prefix hit is read."""
    end: int
    emitted: int
    hashes: list[bytes]
    num_published: int
    num_sent: int
    rows: dict[int, tuple[dict[str, bytes], int]] = field(default_factory=dict)
    error: str | None = None


@dataclass
class ModelStep:
    """A step's own record, taken when it executed."""

    plan: StepPlan
    version: int = 0
    rows: list[tuple[int, ModelCapture, int, list[tuple[dict[str, bytes], int]]]] = field(default_factory=list)
    """(index in the results, capture, first position, rows)."""
    forks: list[tuple[int, ModelCapture]] = field(default_factory=list)
    touched: list[ModelCapture] = field(default_factory=list)
    sent: list[tuple[int, int, list[bytes]]] = field(default_factory=list)
    """(slot, first block, hashes)."""


class ModelCaptures:
    """The worker half: `begin`, `snapshot`, `process`, in this order for every step and in the order of steps."""

    def __init__(self, num_objects: dict[str, int], block_size: int) -> None:
        self.block_size = block_size
        self.stores = {name: ModelStore(count) for name, count in num_objects.items()}
        self.captures: dict[int, ModelCapture] = {}
        self.by_slot: dict[int, int] = {}
        self.begun: dict[int, AuxBegin] = {}
        self.contents: dict[bytes, tuple[int, ...]] = {}
        """KV hash -> the tokens up to the end of its block."""
        self.break_field: str | None = None
        """A defect that tests plant: rows of this field are lost."""
        self.num_reads = 0

    def begin(self, plan: StepPlan) -> ModelStep:
        aux = plan.aux
        if aux is None:
            return ModelStep(plan)
        for capture_id, _ in aux.ends:
            slot = self.begun[capture_id].slot
            if self.by_slot.get(slot) != capture_id:
                raise ContractError(f"capture {capture_id} ends and does not run")
            del self.by_slot[slot]
        admitted = {admission.slot: admission for admission in plan.admissions}
        for begin in aux.begins:
            if begin.capture_id in self.begun or begin.slot in self.by_slot or begin.slot not in admitted:
                raise ContractError(f"{begin} cannot begin")
            if begin.start // self.block_size != len(begin.hashes) and begin.hashes:
                raise ContractError(f"{len(begin.hashes)} hashes in front of {begin.start}")
            self.begun[begin.capture_id] = begin
            self.by_slot[begin.slot] = begin.capture_id
            self.captures[begin.capture_id] = ModelCapture(
                begin,
                aux.weight_version,
                begin.start,
                begin.emit_from,
                list(begin.hashes),
                len(begin.hashes),
                len(begin.hashes),
            )
        slots = [*plan.slots, *(slot for _, slot in plan.forks)]
        touched = [self.captures[self.by_slot[slot]] for slot in slots if slot in self.by_slot]
        sent = []
        for capture_id, hashes in aux.hashes:
            capture = self.captures[capture_id]
            sent.append((capture.begin.slot, capture.num_sent, hashes))
            capture.num_sent += len(hashes)
        return ModelStep(plan, aux.weight_version, touched=touched, sent=sent)

    def snapshot(self, step: ModelStep, tokens: Callable[[int], tuple[list[int], bool]]) -> None:
        """Right after the forward pass; `tokens` gives a slot's tokens, and whether it computed rubbish."""
        plan = step.plan
        for index, (slot, start, count) in enumerate(zip(plan.slots, plan.starts, plan.counts, strict=True)):
            if slot in self.by_slot:
                ids, void = tokens(slot)
                rows = [
                    (
                        {p.name: bytes(p.row_bytes) if void else row(p, ids[: i + 1], step.version) for p in PROFILES},
                        step.version,
                    )
                    for i in range(start, start + count)
                ]
                step.rows.append((index, self.captures[self.by_slot[slot]], start, rows))
        for index, (_, slot) in enumerate(plan.forks, start=len(plan.slots)):
            if slot in self.by_slot:
                step.forks.append((index, self.captures[self.by_slot[slot]]))
        for begin in plan.aux.begins if plan.aux is not None else ():
            self._check_content(begin.hashes, tokens(begin.slot)[0], 0)
        for slot, first_block, hashes in step.sent:
            self._check_content(hashes, tokens(slot)[0], first_block)

    def process(self, step: ModelStep, result: StepResult | None) -> None:
        """`result` None: the step failed."""
        aux = step.plan.aux
        for _, capture, start, rows in step.rows if result is not None else ():
            if capture.error is not None:
                continue
            if start != capture.end:
                raise ContractError(f"capture {capture.begin.capture_id} has {capture.end} rows, {start} came")
            capture.rows |= dict(enumerate(rows, start=start))
            capture.end += len(rows)
        if result is None:
            for capture in step.touched:
                capture.error = "the step failed"
        else:
            for index, capture in [*((index, capture) for index, capture, *_ in step.rows), *step.forks]:
                if index in result.errors:
                    capture.error = result.errors[index]
        for begin in aux.begins if aux is not None else ():
            self._take_over(self.captures[begin.capture_id])
        self._settle(aux, result)
        if result is not None:
            sampled = [(index, capture) for index, capture, *_ in step.rows if step.plan.samples[index]]
            for index, capture in [*sampled, *step.forks]:
                result.aux[index] = self._emit(capture)

    def _take_over(self, capture: ModelCapture) -> None:
        """The incomplete last block of the shared prompt."""
        if capture.begin.parent is None or capture.error is not None:
            return
        parent = self.captures[capture.begin.parent]
        if parent.error is not None:
            capture.error = parent.error
            return
        tail = range(capture.end // self.block_size * self.block_size, capture.end)
        if any(position not in parent.rows for position in tail):
            raise ContractError(f"capture {capture.begin.parent} lacks rows of its fork's prompt")
        capture.rows |= {position: parent.rows[position] for position in tail}

    def _settle(self, aux: AuxPlan | None, result: StepResult | None) -> None:
        for capture_id, hashes in [*aux.hashes, *aux.ends] if aux is not None else ():
            capture = self.captures[capture_id]
            capture.hashes += hashes
            if result is not None and capture.error is None and len(capture.hashes) * self.block_size > capture.end:
                raise ContractError(f"capture {capture_id}: a hash came before its block was computed")
        puts: dict[str, dict[Key, bytes]] = {name: {} for name in self.stores}
        refused: list[Key] = []
        for capture in self.captures.values() if result is not None else ():
            self._publish(capture, puts, refused)
        for name, store in self.stores.items():
            changes = ([], [], []) if aux is None else (aux.retain, aux.release, aux.discard)
            refused += store.batch(puts[name], *([key for key in keys if key[0] == name] for keys in changes))
        if result is not None:
            result.aux_refused = refused
        for capture_id, _ in aux.ends if aux is not None else ():
            del self.captures[capture_id]

    def _publish(self, capture: ModelCapture, puts: dict[str, dict[Key, bytes]], refused: list[Key]) -> None:
        size = self.block_size
        while capture.num_published < len(capture.hashes) and (
            capture.error is not None or (capture.num_published + 1) * size <= capture.end
        ):
            block = capture.num_published
            capture.num_published += 1
            rows = [capture.rows.get(position) for position in range(block * size, (block + 1) * size)]
            for name in capture.begin.fields:
                if capture.error is not None or name == self.break_field:
                    refused.append((name, capture.hashes[block], capture.version))
                    continue
                held = [one for one in rows if one is not None]
                if len(held) != size or len({version for _, version in held}) != 1:
                    raise ContractError(f"block {block} of capture {capture.begin.capture_id} is not of one piece")
                key = (name, capture.hashes[block], held[0][1])
                puts[name].setdefault(key, b"".join(data[name] for data, _ in held))

    def _emit(self, capture: ModelCapture) -> AuxRows:
        start, first = capture.emitted, min(capture.rows, default=capture.end)
        if capture.begin.parent is not None:
            first = capture.begin.start
        if capture.error is None and self.break_field in capture.begin.fields:
            capture.error = f"rows of {self.break_field} are lost"
        pieces: list[tuple[dict[str, bytes], int]] = []
        if capture.error is None and start < first:
            pieces = self._read(capture, start, first)
        if capture.error is not None:
            return AuxRows(start, 0, 0, dict.fromkeys(capture.begin.fields, b""), [], capture.error)
        num_cached = len(pieces)
        if start > capture.end:
            raise ContractError(f"rows are to be emitted from {start}, {capture.end} are computed")
        pieces += [capture.rows[position] for position in range(max(start, first), capture.end)]
        capture.emitted = capture.end
        data = {name: b"".join(piece[name] for piece, _ in pieces) for name in capture.begin.fields}
        return AuxRows(start, len(pieces), num_cached, data, [(1, version) for _, version in pieces])

    def _read(self, capture: ModelCapture, start: int, end: int) -> list[tuple[dict[str, bytes], int]]:
        self.num_reads += 1
        out = []
        for position in range(start, end):
            block, offset = divmod(position, self.block_size)
            cells = {}
            for profile in PROFILES:
                if profile.name in capture.begin.fields:
                    key = (profile.name, capture.hashes[block], capture.version)
                    if key not in self.stores[profile.name].data:
                        capture.error = f"rows of the reused prompt are lost: block {block} of {profile.name}"
                        return []
                    size = profile.row_bytes
                    data = self.stores[profile.name].data[key]
                    cells[profile.name] = data[offset * size : (offset + 1) * size]
            out.append((cells, capture.version))
        return out

    def _check_content(self, hashes: list[bytes], token_ids: list[int], first_block: int) -> None:
        for block, block_hash in enumerate(hashes, start=first_block):
            content = tuple(token_ids[: (block + 1) * self.block_size])
            if len(content) < (block + 1) * self.block_size or self.contents.setdefault(block_hash, content) != content:
                raise ContractError(f"the hash of block {block} stands for other tokens")


class CapturingWorker(FakeWorker):
    """A `FakeWorker` with captures. `late`: steps are processed when they are consumed, not when they execute."""

    captures: ModelCaptures
    late: bool
    unprocessed: deque[Callable[[], None]]

    def execute(self, plan: StepPlan) -> StepResult:
        step = self.captures.begin(plan)
        failed = False
        try:
            result = super().execute(plan)
        except PlannedFailure:
            failed = True
            raise
        else:
            return result
        finally:
            if not failed:
                self.captures.snapshot(step, lambda slot: (self._rows[slot].token_ids, self._rows[slot].void))
            self.unprocessed.append(lambda: self.captures.process(step, None if failed else result))
            if not self.late:
                self.process()

    def process(self) -> None:
        self.unprocessed.popleft()()


def capture_config(num_objects: int | dict[str, int] = 1000, block_size: int = 16) -> ResolvedCapture:
    counts = {profile.name: num_objects for profile in PROFILES} if isinstance(num_objects, int) else num_objects
    return ResolvedCapture(
        profiles=PROFILES, block_size=block_size, num_objects=counts, max_step_tokens=1024, queue_size=2
    )


class CaptureDriver(StepDriver):
    """A step driver whose requests may ask for rows: `add(..., fields=(...), start=s)`."""

    def __init__(
        self,
        cache: ResolvedCache | None = None,
        *,
        num_objects: int | dict[str, int] = 1000,
        late: bool = False,
        capture: bool = True,
        **options: Any,
    ) -> None:
        cache = cache or cache_config(full_group(1000))
        config = capture_config(num_objects, cache.block_size)
        made: Any = partial(Scheduler, capture=config if capture else None)
        super().__init__(cache, scheduler_class=made, **options)
        if capture:
            worker = CapturingWorker(cache.groups, cache.block_size, self.next_token)
            worker.captures = ModelCaptures(config.num_objects, cache.block_size)
            worker.late, worker.unprocessed = late, deque()
            self.worker: Any = worker
        self.versions: dict[Request, list[int]] = {}
        """Weight version of every accepted token."""

    @property
    def aux(self) -> AuxCoordinator:
        assert self.scheduler.aux is not None
        return self.scheduler.aux

    @property
    def captures(self) -> ModelCaptures:
        captures: ModelCaptures = self.worker.captures
        return captures

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int = 16,
        *,
        fields: Sequence[str] = (),
        start: int = 0,
        **options: Any,
    ) -> Request:
        request = super().add(prompt, max_tokens, **options)
        request.rows = request_rows(fields, len(prompt), max_tokens, start)
        return request

    def schedule(self) -> ScheduledStep | None:
        step = super().schedule()
        if step is not None:
            aux = step.plan.aux
            assert step.weight_version == self.scheduler.weight_version
            assert aux is None or aux.weight_version == step.weight_version
            assert aux is not None or not (self.scheduler.aux and self.aux.num_live)
        return step

    def apply(self, *args: Any, **options: Any) -> None:
        step = self.in_flight[0][0]
        if self.scheduler.aux is not None and self.worker.late:
            self.worker.process()
        before = {request: len(request.token_ids) for _, request, _ in step.outcomes()}
        super().apply(*args, **options)
        for request, length in before.items():
            gained = len(request.token_ids) - length
            self.versions.setdefault(request, []).extend([step.weight_version] * gained)

    def hit(self, prompt: Sequence[int], *, fields: Sequence[str] = (ROUTES.name,), start: int = 0) -> int:
        """Tokens of the prefix hit that such a request would get."""
        request = super().add(prompt)
        request.rows = request_rows(fields, len(prompt), 16, start)
        hit = self.scheduler._match(request)
        self.scheduler.finish(request, "abort")
        return hit.num_tokens

    def refuse(self, keys: list[Key]) -> None:
        """The store says that it does not have these."""
        result = StepResult(self.scheduler._step_id, [], [])
        result.aux_refused = keys
        self.aux.applied(result)

    def check_rows(self, request: Request) -> None:
        """Every row that belongs to the request's tokens is there and right."""
        rows = request.rows
        assert rows is not None and rows.failure is None, rows and rows.failure
        exported = rows.export()
        assert tuple(exported) == request.capture_fields
        for profile in rows.profiles:
            out = exported[profile.name]
            if not request.num_output:
                assert (out.count, bytes(out.data), out.versions) == (0, b"", ()) and out.error is not None
                continue
            assert out.error is None
            assert (out.start, out.count) == (rows.start, max(0, len(request.token_ids) - 1 - rows.start))
            assert len(out.status) == sum(count for count, _ in out.versions) == out.count
            assert bytes(out.data) == expected_data(out, profile, request.token_ids)

    def check_store(self) -> None:
        """Whatever the store has, kept or not, is right."""
        size = self.kv.block_size
        contents = {
            block_hash: request.token_ids[: (index + 1) * size]
            for request in self.requests
            for index, block_hash in enumerate(request.blocks.hashes)
        }
        for profile in PROFILES:
            for (_, block_hash, version), data in self.captures.stores[profile.name].data.items():
                ids = contents[block_hash]
                block = range(len(ids) - size, len(ids))
                assert data == b"".join(row(profile, ids[: i + 1], version) for i in block)

    def check_versions(self, request: Request) -> None:
        spans = request.weight_versions(request.num_output)
        assert [version for first, end, version in spans for _ in range(first, end)] == self.versions.get(request, [])

    def check_drained(self) -> None:
        """After the last request: no capture lives, nothing is pinned, both halves agree on what is kept, all of it exists."""
        while self.aux.retained.has_changes():
            self.add([1], 1)
            self.run()
        assert self.aux.num_live == 0 and self.aux.retained.num_pinned == 0
        assert not self.captures.captures and not self.captures.by_slot
        kept = {key for store in self.captures.stores.values() for key in store.retained}
        assert kept == set(self.aux.retained._objects)
        assert all(key in self.captures.stores[key[0]].data for key in kept)
        self.check_store()
        for name, store in self.captures.stores.items():
            assert sum(key[0] == name for key in kept) <= store.capacity


def request_rows(fields: Sequence[str], prompt_len: int, max_tokens: int, start: int = 0) -> RequestRows | None:
    profiles = [profile for profile in PROFILES if profile.name in fields]
    if not profiles:
        return None
    return RequestRows(profiles, prompt_len=prompt_len, max_tokens=max_tokens, start=start)
