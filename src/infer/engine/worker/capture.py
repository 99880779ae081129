"""Capture of per-token rows beside the output, worker half: what a step wrote into taps becomes blocks and emitted rows.

Runs on the worker thread, in the order begin_step, forward pass, snapshot, process; owns taps, captures and stores.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from infer.config.capture import ITEM_SIZES, CaptureProfile, ResolvedCapture, object_key
from infer.engine.sampling.queued import Upload
from infer.engine.step import AuxBegin, AuxPlan, AuxRows, StepPlan, StepResult
from infer.engine.worker.background_store import BackgroundStore
from infer.engine.worker.block_store import BlockStoreError
from infer.engine.worker.captured_fields import CapturedField
from infer.engine.worker.captured_rows import Capture
from infer.engine.worker.captured_step import CapturedStep
from infer.engine.worker.input_batch import StepRows
from infer.engine.worker.taps import Tap

logger = logging.getLogger("infer.engine.worker")
Key = tuple[str, bytes, int]
"""(field, KV block hash, weight version), as it travels in plans."""
Objects = dict[str, dict[bytes, bytes]]
"""Field -> key in its store -> rows."""
FAILED_STEP = "the step that computes these rows failed"


class RowCapture:
    """All captures of one runner. No error of rows becomes an error of the step."""

    def __init__(
        self,
        fields: Sequence[CapturedField],
        taps: Mapping[str, Tap],
        stores: Mapping[str, BackgroundStore],
        resolved: ResolvedCapture,
    ) -> None:
        """`taps` by name, `stores` by field."""
        self._fields = {captured.profile.name: captured for captured in fields}
        self._taps = dict(taps)
        self._stores = dict(stores)
        self._block_size = resolved.block_size
        self._in_files = resolved.store_dir is not None
        self._max_step_tokens = resolved.max_step_tokens
        self._prefixes = {name: resolved.run + captured.profile.digest for name, captured in self._fields.items()}
        self._captures: dict[int, Capture] = {}
        self._by_slot: dict[int, Capture] = {}
        self._version = 0
        self._refused: list[Key] = []
        self._num_uniform = 0
        self._attached = False
        self._probing = False
        self.upload: Upload | None = None
        """Of a platform with staging: how numbers get to the device without waiting for it."""

    def num_bytes(self) -> int:
        """Of the taps and the stores, if these are in memory."""
        taps = sum(tap.buffer.numel() * tap.buffer.element_size() for tap in self._taps.values())
        if self._in_files:
            return taps
        return taps + sum(store.object_bytes * store.num_objects for store in self._stores.values())

    @property
    def is_tapping(self) -> bool:
        """Whether the model writes into taps in this step."""
        return self._attached

    def probe(self, num_tokens: int, run: Callable[[], object]) -> None:
        """Run a step of so many tokens with open taps and check that all of them are written. Raises `ConfigError`."""
        self._open_taps(num_tokens)
        self._probing = True
        try:
            run()
            for tap in self._taps.values():
                tap.check_probe(num_tokens)
        finally:
            self._probing = False
            self._close_taps()

    def begin_step(self, plan: StepPlan) -> CapturedStep:
        """Take the plan's events in and open the taps if one of its rows is captured. Waits for nothing."""
        begins = [] if plan.aux is None else self._take_events(plan.aux)
        step = CapturedStep(aux=plan.aux, version=self._version, begins=begins, by_slot={}, forks=[])
        if self._probing:
            return step
        if self._by_slot:
            step.by_slot = {slot: self._by_slot[slot] for slot in plan.slots if slot in self._by_slot}
            step.forks = [
                (index, self._by_slot[slot])
                for index, (_, slot) in enumerate(plan.forks, start=len(plan.slots))
                if slot in self._by_slot
            ]
        if step.by_slot and plan.num_tokens > self._max_step_tokens:
            for capture in step.by_slot.values():
                capture.fail(f"a step of {plan.num_tokens} tokens is larger than the taps ({self._max_step_tokens})")
        if any(capture.error is None for capture in step.by_slot.values()):
            self._open_taps(plan.num_tokens)
        elif self._attached:
            self._close_taps()
        return step

    def snapshot(self, step: CapturedStep, rows: StepRows, hidden: Tensor) -> None:
        """Right after the forward pass, which returned `hidden`: copy what it wrote for captured rows out of the taps,
        narrowed."""
        if not step.by_slot or self._probing:
            return
        slots = rows.slots.tolist()
        chosen = [(i, step.by_slot[slot]) for i, slot in enumerate(slots) if slot in step.by_slot]
        chosen = [(i, capture) for i, capture in chosen if capture.error is None]
        if not chosen:
            return
        step.rows = chosen
        tokens = self._on_device(_tokens([i for i, _ in chosen], rows))
        for name in dict.fromkeys(name for _, capture in chosen for name in capture.row_bytes):
            captured = self._fields[name]
            tap = self._taps[captured.tap]
            try:
                shape = (len(tokens), *captured.profile.row_shape)
                dtype: torch.dtype = getattr(torch, captured.profile.dtype)
                out = torch.empty(shape, dtype=dtype, device=tap.buffer.device)
                tap.select(captured.field, hidden, tokens, out)
                evidence = tap.evidence(tokens)
            except Exception as error:  # a plugin's: the rows of this step are lost, the tokens are not
                step.problems[name] = f"{name} could not be captured: {type(error).__name__}: {error}"
                continue
            step.data[name] = out
            if evidence is not None:
                step.evidence[name] = evidence

    def _on_device(self, numbers: NDArray[np.int64]) -> Tensor:
        if self.upload is not None:
            return self.upload([numbers])[0]
        return torch.from_numpy(numbers).to(next(iter(self._taps.values())).buffer.device)

    def process(self, step: CapturedStep, rows: StepRows | None, result: StepResult) -> None:
        """When the step's output is consumed, in the order of the steps: append, publish every block that is complete now,
        then emit for the rows that sampled."""
        try:
            self._process(step, rows, result)
        except Exception as error:  # a defect of ours; tokens are worth more than rows
            logger.exception("captured rows of step %d are lost", result.step_id)
            for capture in (*self._captures.values(), *step.by_slot.values()):
                capture.fail(f"capture failed: {type(error).__name__}: {error}")

    def _process(self, step: CapturedStep, rows: StepRows | None, result: StepResult) -> None:
        if rows is not None and (step.rows or step.by_slot or step.forks):
            self._append(step, rows, result)
        elif not step.begins and step.aux is None:
            return
        self._settle(step)
        if rows is not None:
            for i, capture in self._sampled(step, rows):
                result.aux[i] = self._emit(capture)
        for _, capture in step.rows:
            capture.trim()
        result.aux_refused = self._take_refused()
        result.aux_uniform_blocks, self._num_uniform = self._num_uniform, 0

    def abandon(self, step: CapturedStep) -> None:
        """The step raised: its rows do not exist, its events still count."""
        for capture in (*step.by_slot.values(), *(capture for _, capture in step.forks)):
            capture.fail(FAILED_STEP)
        self._settle(step)

    def close(self) -> None:
        """Free everything; a second call does nothing."""
        if self._attached:
            self._close_taps()
        for store in self._stores.values():
            store.close()
        self._stores = {}
        self._taps = {}
        self._captures = {}
        self._by_slot = {}

    def _take_events(self, aux: AuxPlan) -> list[Capture]:
        """Which slots are captured from this step on. What ends keeps its rows until this step is processed: output of
        earlier steps may still be on its way."""
        self._version = aux.weight_version
        for capture_id, _ in aux.ends:
            ended = self._captures.get(capture_id)
            if ended is not None and self._by_slot.get(ended.slot) is ended:
                del self._by_slot[ended.slot]
        begins = []
        for begin in aux.begins:
            capture = self._new_capture(begin, aux.weight_version)
            self._captures[begin.capture_id] = capture
            self._by_slot[begin.slot] = capture
            begins.append(capture)
        return begins

    def _new_capture(self, begin: AuxBegin, version: int) -> Capture:
        known = {name: self._fields[name].profile.row_bytes for name in begin.fields if name in self._fields}
        capture = Capture(begin, version, self._block_size, known)
        missing = [name for name in begin.fields if name not in known]
        if missing:
            capture.fail(f"{missing[0]} is not captured by this engine")
        if begin.parent is not None:
            capture.parent = self._captures.get(begin.parent)
            if capture.parent is None:
                capture.fail("the request it was forked from is not captured any more")
        return capture

    def _append(self, step: CapturedStep, rows: StepRows, result: StepResult) -> None:
        """Give every captured row its part of the snapshot."""
        for i, capture in self._indexed(step, rows):
            if i in result.errors:
                capture.fail(f"the request failed: {result.errors[i]}")
        for index, capture in step.forks:
            if index in result.errors:
                capture.fail(f"the request failed: {result.errors[index]}")
        data = {name: _host_bytes(tensor) for name, tensor in step.data.items()}
        invalid = {name: found for name, seen in step.evidence.items() if (found := seen.invalid()) is not None}
        first = 0
        for i, capture in step.rows:
            start, count = int(rows.starts[i]), int(rows.counts[i])
            last = first + count
            for name in capture.row_bytes:
                if name in step.problems:
                    capture.fail(step.problems[name])
                elif name in invalid and invalid[name][first:last].any():
                    position = start + int(invalid[name][first:last].argmax())
                    capture.fail(f"{name} of position {position} holds ids that the model does not have")
            if capture.error is None:
                sizes = capture.row_bytes.items()
                pieces = {name: data[name][first * size : last * size] for name, size in sizes}
                capture.append(start, count, pieces, step.version)
            first = last
        for capture in step.begins:
            if capture.parent is not None:
                capture.take_over()

    def _settle(self, step: CapturedStep) -> None:
        """Hashes, then one batch per store: what is complete, and the plan's changes."""
        aux = step.aux
        objects: Objects = {name: {} for name in self._fields}
        touched = {id(capture): capture for capture in (*step.begins, *(capture for _, capture in step.rows))}
        if aux is not None:
            for capture_id, hashes in aux.hashes:
                capture = self._captures.get(capture_id)
                if capture is not None:
                    capture.hashes += hashes
                    touched[id(capture)] = capture
            for capture_id, hashes in aux.ends:
                capture = self._captures.pop(capture_id, None)
                if capture is not None:
                    touched.pop(id(capture), None)
                    capture.hashes += hashes
                    self._publish(capture, objects, step.version)
                    capture.fail("the request has ended")
                    self._publish(capture, objects, step.version)
        for capture in touched.values():
            self._publish(capture, objects, step.version)
        for name, store in self._stores.items():
            self._update_store(name, store, objects[name], aux)

    def _publish(self, capture: Capture, objects: Objects, version: int) -> None:
        for block in capture.complete_blocks(version):
            for name in capture.row_bytes:
                if not block.publishable:
                    self._refused.append((name, block.kv_hash, block.version))
                    continue
                data = capture.block(name, block.index)
                self._count_uniform(self._fields[name].profile, data)
                # A neighbour may have computed the same block in the same step: equal content, the first one stays.
                objects[name].setdefault(self._key(name, block.kv_hash, block.version), data)

    def _update_store(
        self, name: str, store: BackgroundStore, objects: dict[bytes, bytes], aux: AuxPlan | None
    ) -> None:
        changes: tuple[Sequence[Key], ...] = ((), (), ()) if aux is None else (aux.retain, aux.release, aux.discard)
        retain, release, discard = ([self._key(*key) for key in keys if key[0] == name] for keys in changes)
        try:
            if discard:
                store.discard(discard)
            if objects or retain or release:
                store.put(objects, retain, release)
            refused: Iterable[bytes] = store.take_refused()
        except BlockStoreError:
            logger.exception("captured rows of %s are not kept for reuse any more", name)
            refused = objects
        self._refused += [self._parse(name, key) for key in refused]

    def _emit(self, capture: Capture) -> AuxRows:
        if capture.error is None and capture.next_emitted < capture.first:
            try:
                cached = self._cached(capture)
            except BlockStoreError as error:
                capture.fail(f"rows of the reused prompt are lost: {error}")
            else:
                return capture.emit(cached)
        return capture.emit({}) if capture.error is None else capture.failure()

    def _cached(self, capture: Capture) -> dict[str, bytes]:
        """Rows [next_emitted, first) from the store."""
        size, start, stop = self._block_size, capture.next_emitted, capture.first
        first, last = start // size, -(-stop // size)
        if last > len(capture.hashes):
            raise BlockStoreError(f"the hashes of blocks {len(capture.hashes)} to {last - 1} are not known")
        found = {}
        for name, row_bytes in capture.row_bytes.items():
            keys = [self._key(name, kv_hash, capture.cached_version) for kv_hash in capture.hashes[first:last]]
            rows = b"".join(self._stores[name].read(keys))
            found[name] = rows[(start - first * size) * row_bytes : (stop - first * size) * row_bytes]
        return found

    def _sampled(self, step: CapturedStep, rows: StepRows) -> Iterable[tuple[int, Capture]]:
        """(index in the result, capture) of rows and forks that drew a token."""
        samples = rows.samples.tolist()
        slots = rows.slots.tolist()
        for i, plan_row in enumerate(rows.plan_rows.tolist()):
            if samples[i] and slots[i] in step.by_slot:
                yield plan_row, step.by_slot[slots[i]]
        yield from step.forks

    def _indexed(self, step: CapturedStep, rows: StepRows) -> Iterable[tuple[int, Capture]]:
        for slot, plan_row in zip(rows.slots.tolist(), rows.plan_rows.tolist(), strict=True):
            if slot in step.by_slot:
                yield plan_row, step.by_slot[slot]

    def _take_refused(self) -> list[Key]:
        refused, self._refused = self._refused, []
        return refused

    def _count_uniform(self, profile: CaptureProfile, data: bytes) -> None:
        size = ITEM_SIZES[profile.dtype]
        if data == data[:size] * (len(data) // size):
            self._num_uniform += 1
            logger.warning("all cells of a captured block of %s are equal: is the router broken?", profile.name)

    def _key(self, name: str, kv_hash: bytes, version: int) -> bytes:
        """In the store of the field: `object_key`."""
        return object_key(self._prefixes[name], version, kv_hash)

    def _parse(self, name: str, key: bytes) -> Key:
        at = len(self._prefixes[name])
        return name, key[at + 8 :], int.from_bytes(key[at : at + 8], "big")

    def _open_taps(self, num_tokens: int) -> None:
        if not self._attached:
            self._attached = True
            for tap in self._taps.values():
                tap.attach()
        for tap in self._taps.values():
            tap.clear(num_tokens)

    def _close_taps(self) -> None:
        self._attached = False
        for tap in self._taps.values():
            tap.detach()


def _tokens(indices: list[int], rows: StepRows) -> NDArray[np.int64]:
    """Indices among the step's tokens of those of these rows."""
    starts = rows.query_starts
    first, last = indices[0], indices[-1]
    if last - first == len(indices) - 1:
        return np.arange(starts[first], starts[last + 1])
    return np.concatenate([np.arange(starts[i], starts[i + 1]) for i in indices])


def _host_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, row after row."""
    return tensor.cpu().view(torch.uint8).numpy().reshape(-1).data
