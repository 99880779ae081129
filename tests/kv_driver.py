"""The control plane with an external KV store, by hand: a scripted connector and a worker that moves content between blocks.
For tests; runs in the test's own thread. The worker models content, so KV that is not what was computed is an error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from infer.config.resolve import ResolvedCache
from infer.engine.kv_cache.external import ExternalKV
from infer.engine.kv_cache.manager import KVCacheManager
from infer.engine.step import StepPlan, StepResult
from infer.plugins.kv_connector import ExternalMatch, KVReport, KVTransfer
from infer.testing.fake_executor import _VOID, FakeWorker
from step_driver import StepDriver, cache_config, full_group

JUNK = b"somebody else is writing here"
"""Whoever reads it violates the plan; where a step waits for its load the fake's own void stands for it, which spoils the
row but may be read: until the result has come, steps in flight build on it."""
Key = tuple[bytes, int]
"""(block hash, group)."""


class ScriptedConnector:
    """Finds what the worker's store has, or what `script` says."""

    def __init__(self, block_size: int) -> None:
        self.store: dict[Key, list[bytes]] = {}
        self.num_groups = 1
        self.wait = False
        self.script: Callable[[str, int], ExternalMatch | None] = lambda request_id, asked: None
        """(request, how often it was asked) -> the answer, or None for what the store has."""
        self.asked: dict[str, int] = {}
        self.forgotten: list[str] = []
        self.closed = False
        self._block_size = block_size

    def match(
        self, request_id: str, block_hashes: Sequence[bytes], num_tokens: int, num_local_tokens: int
    ) -> ExternalMatch:
        self.asked[request_id] = self.asked.get(request_id, 0) + 1
        answer = self.script(request_id, self.asked[request_id])
        if answer is not None:
            return answer
        found = 0
        for block_hash in block_hashes:
            if not all((block_hash, group) in self.store for group in range(self.num_groups)):
                break
            found += self._block_size
        return ExternalMatch("hit", found, self.wait) if found > num_local_tokens else ExternalMatch("miss")

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)

    def close(self) -> None:
        self.closed = True


class TransferWorker(FakeWorker):
    """A `FakeWorker` with the worker half. A transfer lasts until `release` says so (for one that a step waits for: in that
    step); until then it scribbles over the blocks that it loads into."""

    store: dict[Key, list[bytes]]
    handed_over: dict[tuple[str, int], list[bytes]]
    """(request, index) -> content of a last block that is not full."""
    release: Callable[[KVTransfer], bool]
    failing: Callable[[KVTransfer], Sequence[int]]
    """Places in the transfer's blocks that do not come."""
    late: Callable[[KVTransfer], bool]
    """Whether a step waits for the load in vain."""
    pending: dict[int, KVTransfer]
    started: list[KVTransfer]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.store, self.handed_over, self.pending, self.started = {}, {}, {}, []
        self.release = lambda transfer: True
        self.failing = lambda transfer: ()
        self.late = lambda transfer: False
        self._unreported: list[KVReport] = []
        self._late_ids: list[int] = []

    def execute(self, plan: StepPlan) -> StepResult:
        for transfer in [] if plan.kv is None else plan.kv.start:
            self.pending[transfer.job_id] = transfer
            self.started.append(transfer)
            if transfer.wait and self.late(transfer):
                self._late_ids.append(transfer.job_id)
            elif transfer.wait:
                self._end(transfer)
        for transfer in self.pending.values():
            if transfer.kind == "load":
                for block in transfer.blocks:
                    self._fill(block.group, block.block_id, [_junk(transfer)] * self.block_size)
        result = super().execute(plan)
        for transfer in list(self.pending.values()):
            if self.release(transfer) and transfer.job_id not in self._late_ids:
                self._end(transfer)
        result.kv_reports, self._unreported = self._unreported, []
        result.kv_late, self._late_ids = self._late_ids, []
        return result

    def _end(self, transfer: KVTransfer) -> None:
        del self.pending[transfer.job_id]
        failed = set(self.failing(transfer))
        for place, block in enumerate(transfer.blocks):
            key = (block.hash, block.group)
            if transfer.kind == "save":
                content = [self._kv.get((block.group, block.block_id, o), b"") for o in range(self.block_size)]
                assert not {JUNK, _VOID, b""} & set(content), "a block was saved that is not computed"
                if place not in failed:
                    assert self.store.setdefault(key, content) == content, "one hash, two contents"
                continue
            found = self.store.get(key) if block.hash else self.handed_over.get((transfer.request_id, block.index))
            if found is None or place in failed:
                failed.add(place)
                found = [_junk(transfer)] * self.block_size
            self._fill(block.group, block.block_id, found)
        self._unreported.append(KVReport(transfer.job_id, tuple(sorted(failed))))

    def _fill(self, group: int, block_id: int, content: list[bytes]) -> None:
        for offset, digest in enumerate(content):
            self._kv[group, block_id, offset] = digest


def _junk(transfer: KVTransfer) -> bytes:
    return _VOID if transfer.wait else JUNK


class ExternalDriver(StepDriver):
    """A `StepDriver` with a store that connector and worker share."""

    worker: TransferWorker

    def __init__(
        self,
        cache: ResolvedCache | None = None,
        *,
        save: bool = True,
        fail_requests: bool = False,
        timeout: float = 10.0,
        worker: type[TransferWorker] = TransferWorker,
        **options: Any,
    ) -> None:
        cache = cache or cache_config(full_group(1000))
        self.now = 0.0
        self.connector = ScriptedConnector(cache.block_size)
        self.connector.num_groups = len(cache.groups)

        def make(kv: KVCacheManager) -> ExternalKV:
            return ExternalKV(
                self.connector,
                kv,
                save=save,
                fail_requests=fail_requests,
                timeout=timeout,
                clock=lambda: self.now,
            )

        super().__init__(cache, external=make, worker=worker, clock=lambda: self.now, **options)
        self.connector.store = self.worker.store
        assert self.scheduler.external is not None
        self.external = self.scheduler.external

    def remember(self, prompt: Sequence[int], num_blocks: int) -> None:
        """Put the first blocks of a prompt into the store, as another engine would have computed them."""
        groups = [msgspec.structs.replace(group, num_blocks=1000) for group in self.kv.groups]
        other = ExternalDriver(cache_config(*groups, block_size=self.kv.block_size))
        other.add(prompt, 1)
        other.run()
        hashes = other.kv.hashes(other.requests[0], num_blocks)
        assert len(hashes) == num_blocks
        for block_hash in hashes:
            for group in range(len(self.kv.groups)):
                self.worker.store[block_hash, group] = other.worker.store[block_hash, group]

    def assert_nothing_left(self) -> None:
        """Nothing is on its way either; what the checks themselves compute is saved, and that ends."""
        for _ in range(200):
            if not self.external.is_pending:
                break
            self.step()
        assert not self.external.is_pending and not self.worker.pending
        super().assert_nothing_left()
