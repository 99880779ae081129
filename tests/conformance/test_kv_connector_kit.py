"""Planted bugs of KV connectors: the kit must name the promise that each breaks, and pass the connector without them."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from infer.plugins import kv_store
from infer.plugins.kv_connector import (
    API_VERSION,
    ExternalMatch,
    KVBlock,
    KVBlocks,
    KVConnectorSpec,
    KVFacts,
    KVReport,
    KVTransfer,
)
from infer.plugins.kv_store import StoreMatcher, StoreTransfer
from infer.testing.kits import kv_connector


class Shelf:
    """A store in memory, and what can be done to it."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.away = False
        self.silent: threading.Event | None = None

    def _answer(self) -> None:
        silent = self.silent
        if silent is not None:
            silent.wait(30)
        if self.away:
            raise ConnectionError("the shelf is away")

    def contains(self, keys: Sequence[str]) -> list[bool]:
        self._answer()
        return [key in self.values for key in keys]

    def get(self, keys: Sequence[str]) -> list[bytes | None]:
        self._answer()
        return [self.values.get(key) for key in keys]

    def put(self, values: Mapping[str, bytes]) -> None:
        self._answer()
        self.values |= values

    def close(self) -> None:
        """The values stay."""

    @contextmanager
    def outage(self) -> Iterator[None]:
        self.away = True
        yield
        self.away = False

    @contextmanager
    def delay(self) -> Iterator[None]:
        self.silent = threading.Event()
        yield
        self.silent.set()
        self.silent = None

    def lose(self) -> None:
        for key in sorted(self.values)[::2]:
            del self.values[key]

    def damage(self) -> None:
        for number, (key, value) in enumerate(list(self.values.items())):
            self.values[key] = value[:-1] if number % 2 else value[:-3] + bytes([value[-3] ^ 8]) + value[-2:]


class FindsEverything(StoreMatcher):
    def match(self, request_id: str, hashes: Sequence[bytes], num_tokens: int, num_local: int) -> ExternalMatch:
        return ExternalMatch("hit", len(hashes) * 4) if hashes else ExternalMatch("miss")


class SkipsGaps(StoreMatcher):
    def _longest(self, hashes: Sequence[bytes], first: int) -> int:
        keys = [kv_store.block_key(self._facts, block_hash, 0) for block_hash in hashes[first:]]
        return first + sum(self._store.contains(keys))


class CountsOnlyItsOwn(StoreMatcher):
    def match(self, request_id: str, hashes: Sequence[bytes], num_tokens: int, num_local: int) -> ExternalMatch:
        answer = super().match(request_id, hashes, num_tokens, num_local)
        return ExternalMatch(answer.state, answer.num_tokens - num_local) if answer.state == "hit" else answer


class WaitsForTheStore(StoreMatcher):
    def match(self, request_id: str, hashes: Sequence[bytes], num_tokens: int, num_local: int) -> ExternalMatch:
        found = self._longest(hashes, num_local // 4) * 4
        return ExternalMatch("hit", found) if found > num_local else ExternalMatch("miss")


class FailsWhileTheStoreIsSilent(StoreMatcher):
    """In the thread that the kit calls it from."""

    def match(self, request_id: str, hashes: Sequence[bytes], num_tokens: int, num_local: int) -> ExternalMatch:
        if request_id == "slow":
            raise TimeoutError("the shelf says nothing")
        return super().match(request_id, hashes, num_tokens, num_local)


class FailsToCloseInTime(StoreTransfer):
    """Only while the store is silent: the kit closes it from a thread then."""

    def close(self) -> None:
        silent = getattr(self._store, "silent", None)
        super().close()
        if silent is not None:
            raise TimeoutError("a load was on its way")


class ReportsTwice(StoreTransfer):
    def poll(self, timeout: float) -> list[KVReport]:
        return [report for report in super().poll(timeout) for _ in range(2)]


class ForgetsEmptyHanded(StoreTransfer):
    """Says nothing of a load of which nothing came."""

    def poll(self, timeout: float) -> list[KVReport]:
        return [report for report in super().poll(timeout) if len(report.failed) < 6]


class HidesFailures(StoreTransfer):
    def poll(self, timeout: float) -> list[KVReport]:
        return [KVReport(report.job_id) for report in super().poll(timeout)]


class TrustsTheStore(StoreTransfer):
    def _load(self, blocks: KVBlocks, piece: Sequence[KVBlock]) -> int:
        keys = [kv_store.block_key(self._facts, block.hash, block.group) for block in piece]
        for done, (block, value) in enumerate(zip(piece, self._store.get(keys), strict=True)):
            size = self._facts.groups[block.group].block_bytes
            if value is None:
                return done
            blocks.write(block.group, block.block_id, value[-size:])
        return len(piece)


class ReportsBeforeItReads(StoreTransfer):
    def start(self, transfers: Sequence[KVTransfer]) -> None:
        for transfer in transfers:
            if transfer.kind == "save":
                self._reports.put(KVReport(transfer.job_id))
                threading.Timer(0.05, self._save, (self._blocks, transfer.blocks)).start()
            else:
                super().start([transfer])


class LoadsNextDoor(StoreTransfer):
    def start(self, transfers: Sequence[KVTransfer]) -> None:
        super().start(transfers)
        for transfer in transfers:
            if transfer.kind == "load" and self._blocks is not None:
                block = transfer.blocks[-1]
                size = self._facts.groups[block.group].block_bytes
                for place in range(1, 25):
                    if place not in {b.block_id for b in transfer.blocks}:
                        self._blocks.write(block.group, place, bytes(size))


class WritesAfterClose(StoreTransfer):
    def start(self, transfers: Sequence[KVTransfer]) -> None:
        for transfer in transfers:
            if transfer.kind == "load":
                threading.Thread(target=self._write_late, args=(transfer,), daemon=True).start()
            else:
                super().start([transfer])

    def _write_late(self, transfer: KVTransfer) -> None:
        assert self._blocks is not None
        self._load(self._blocks, transfer.blocks)
        time.sleep(0.1)
        self._closing.clear()
        self._load(self._blocks, transfer.blocks)
        self._reports.put(KVReport(transfer.job_id))


class SavesOneGroup(StoreTransfer):
    def _save(self, blocks: KVBlocks, piece: Sequence[KVBlock]) -> int:
        super()._save(blocks, [block for block in piece if block.group == 0])
        return len(piece)


class GivesNoReason(StoreTransfer):
    def poll(self, timeout: float) -> list[KVReport]:
        return [KVReport(report.job_id, report.failed) for report in super().poll(timeout)]


BUGS: list[tuple[type[StoreMatcher], type[StoreTransfer], str]] = [
    (FindsEverything, StoreTransfer, "nothing_there"),
    (SkipsGaps, StoreTransfer, "beginning_only"),
    (CountsOnlyItsOwn, StoreTransfer, "beyond_local"),
    (WaitsForTheStore, StoreTransfer, "never_waits"),
    (FailsWhileTheStoreIsSilent, StoreTransfer, "never_waits"),
    (StoreMatcher, FailsToCloseInTime, "no_write_after_close"),
    (StoreMatcher, ReportsTwice, "round_trip"),
    (StoreMatcher, ForgetsEmptyHanded, "nothing_there"),
    (StoreMatcher, HidesFailures, "nothing_there"),
    (StoreMatcher, TrustsTheStore, "damage"),
    (StoreMatcher, ReportsBeforeItReads, "saved_when_reported"),
    (StoreMatcher, LoadsNextDoor, "round_trip"),
    (StoreMatcher, WritesAfterClose, "no_write_after_close"),
    (StoreMatcher, SavesOneGroup, "round_trip"),
    (StoreMatcher, GivesNoReason, "outage"),
]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., set[str]]:
    """(halves, names of checks) -> the checks that fail, over one shelf."""

    def failures(matcher: type[StoreMatcher], transfer: type[StoreTransfer], only: str = "") -> set[str]:
        shelf = Shelf()

        def scheduler_half(options: dict[str, Any], facts: KVFacts) -> StoreMatcher:
            return matcher(shelf, facts)

        def worker_half(options: dict[str, Any], facts: KVFacts) -> StoreTransfer:
            return transfer(shelf, facts)

        module = ModuleType("planted_connector")
        module.scheduler_half, module.worker_half = scheduler_half, worker_half  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "planted_connector", module)
        spec = KVConnectorSpec(
            name="planted",
            api=API_VERSION,
            factory="planted_connector:scheduler_half",
            worker_factory="planted_connector:worker_half",
            example={},
        )
        failed = set()
        for check in kv_connector.checks(spec, tmp_path, lambda options: shelf, patience=60.0 if not only else 2.0):
            if only and check.name != only:
                continue
            shelf.values.clear()
            try:
                check.run()
            except Exception:
                failed.add(check.name)
        return failed

    return failures


def test_a_connector_without_bugs_passes(run: Callable[..., set[str]]) -> None:
    assert run(StoreMatcher, StoreTransfer) == set()


@pytest.mark.row("X-PLUGIN-KIT", "the kit fails six planted plugin bugs")
@pytest.mark.parametrize(
    ("matcher", "transfer", "check"),
    BUGS,
    ids=[f"{m.__name__}-{t.__name__}".replace("StoreMatcher-", "") for m, t, _ in BUGS],
)
def test_the_kit_finds(
    run: Callable[..., set[str]], matcher: type[StoreMatcher], transfer: type[StoreTransfer], check: str
) -> None:
    assert run(matcher, transfer, check) == {check}
