"""Computed KV blocks on their way to the external store, scheduler half: saved once the step that computed them is back.

Runs in the loop task; owns a reference to every block from when it is planned until it is handed to a transfer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from infer.engine.kv_cache.external_jobs import ExternalStats, name_of
from infer.engine.kv_cache.manager import KVCacheManager
from infer.plugins.kv_connector import KVBlock

if TYPE_CHECKING:
    from infer.engine.request import Request

SAVING_SHARE = 4
"""At most one of so many blocks of a pool is held for saving; what is computed beyond is not saved."""


@dataclass(slots=True)
class _Unsaved:
    """One block of a sequence, of every group that has it."""

    step_id: int
    """That computes it, or a later one."""
    request_id: str
    blocks: list[KVBlock]


class Saves:
    """What a step computes is held when it is planned and saved after it has come back."""

    def __init__(self, kv: KVCacheManager, stats: ExternalStats) -> None:
        self.step_id = 0
        """The step being planned, or the last one."""
        self.paused = False
        self._kv = kv
        self._stats = stats
        self._limits = [max(1, pool.num_blocks // SAVING_SHARE) for pool in kv.pools]
        self._num_held = [0] * len(kv.pools)
        """Per group, with those of transfers."""
        self._unconfirmed: list[_Unsaved] = []
        self._confirmed: list[_Unsaved] = []

    def __bool__(self) -> bool:
        return bool(self._unconfirmed or self._confirmed)

    def registered(self, request: Request, first: int, end: int) -> None:
        """Blocks first .. end of the request were just made findable."""
        if self.paused:
            return
        kv, known = self._kv, request.blocks.num_offered
        request.blocks.num_offered = max(known, end)
        for index in range(max(known, first), end):
            block_hash = request.blocks.hashes[index]
            blocks = [
                KVBlock(block_hash, group, table[index], index)
                for group, (pool, table) in enumerate(zip(kv.pools, request.blocks.tables, strict=True))
                if table[index] and pool.find(block_hash) == table[index]  # else another request's is saved
            ]
            if any(self._num_held[block.group] >= self._limits[block.group] for block in blocks):
                self._stats.skipped_saves += len(blocks)
                continue
            for block in blocks:
                kv.pools[block.group].share([block.block_id])
                self._num_held[block.group] += 1
            if blocks:
                self._unconfirmed.append(_Unsaved(self.step_id, name_of(request), blocks))

    def applied(self, step_id: int) -> None:
        """The step has come back, and all before it."""
        self._confirmed += [item for item in self._unconfirmed if item.step_id <= step_id]
        self._unconfirmed = [item for item in self._unconfirmed if item.step_id > step_id]

    def failed(self) -> None:
        """A step failed: later ones may have built on it."""
        self._drop(self._unconfirmed)
        self._unconfirmed = []

    def forget(self, request: Request) -> None:
        """The request failed: what it computed is not to be trusted."""
        name = name_of(request)
        for items in (self._unconfirmed, self._confirmed):
            self._drop([item for item in items if item.request_id == name])
        self._unconfirmed = [item for item in self._unconfirmed if item.request_id != name]
        self._confirmed = [item for item in self._confirmed if item.request_id != name]

    def drop(self) -> None:
        """Save nothing of what was not handed over."""
        self.failed()
        self._drop(self._confirmed)
        self._confirmed = []

    def take(self) -> dict[str, list[KVBlock]]:
        """Request -> its blocks to be saved now, in order. Their references go with them, until `done`."""
        by_request: dict[str, list[KVBlock]] = {}
        for item in self._confirmed:
            by_request.setdefault(item.request_id, []).extend(item.blocks)
        self._confirmed = []
        return by_request

    def done(self, blocks: Iterable[KVBlock]) -> None:
        """Blocks that were taken are held no more."""
        for block in blocks:
            self._num_held[block.group] -= 1

    def _drop(self, items: Iterable[_Unsaved]) -> None:
        for item in items:
            for block in item.blocks:
                self._kv.pools[block.group].free([block.block_id])
            self.done(item.blocks)
