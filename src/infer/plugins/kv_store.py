"""Both halves of a KV connector over a plain store of bytes: threads, keys, checksums, outages. The store only moves bytes.

`match` and `poll` never wait; the store's calls run in threads of the halves, which own them.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Protocol

from infer.plugins.kv_connector import ExternalMatch, KVBlock, KVBlocks, KVFacts, KVReport, KVTransfer

PAUSE = 5.0
"""Seconds that a store which failed is left alone."""
MAX_PIECE = 2**24
"""Bytes that one call of the store moves, or one block."""
LOADERS = 4
"""Threads that load; one more saves."""
MAX_ANSWERS = 4096
"""Lookups kept for requests that have not come for the answer."""
_MAGIC = b"infer-kv-block-1"
_DIGEST = 16
SEAL_BYTES = len(_MAGIC) + _DIGEST


class KVStore(Protocol):
    """What a store must do. Called from several threads at a time; every call should end, or raise, within seconds.

    A missing value is no error. What is raised counts as an outage: the store is left alone for `PAUSE` seconds.
    """

    def contains(self, keys: Sequence[str]) -> Sequence[bool]:
        """Which of the keys have a value."""
        ...

    def get(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        """Their values; None where there is none."""
        ...

    def put(self, values: Mapping[str, bytes]) -> None:
        """Store values. Each is whole or not there; it may be dropped at any time."""
        ...

    def close(self) -> None: ...


class StoreDownError(Exception):
    """The store failed a moment ago and is not asked yet."""


class _Patience:
    """Leaves a store alone for a while after it failed. Shared by the threads of one half."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until = 0.0
        self._error: Exception | None = None

    def check(self) -> None:
        if self._clock() < self._until:
            raise StoreDownError(f"it failed a moment ago: {self._error}") from self._error

    def failed(self, error: Exception) -> None:
        self._error = error
        self._until = self._clock() + PAUSE


class StoreMatcher:
    """`SchedulerConnector` over a store: looks up in a thread and says `later` until it knows."""

    def __init__(self, store: KVStore, facts: KVFacts, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._facts = facts
        self._patience = _Patience(clock)
        self._answers: dict[str, tuple[int, Future[int]]] = {}
        """Request -> blocks that the engine had when it asked, and how many leading blocks can then be had."""
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="infer-kv-lookup")

    def match(
        self, request_id: str, block_hashes: Sequence[bytes], num_tokens: int, num_local_tokens: int
    ) -> ExternalMatch:
        """Raises what the store raised, once per lookup."""
        local = num_local_tokens // self._facts.block_size
        first, asked = self._answers.get(request_id, (local, None))
        if asked is None or (asked.done() and local < first):  # what the engine had and has no more was not looked up
            self._patience.check()
            asked = self._threads.submit(self._count, list(block_hashes), local)
            self._answers[request_id] = local, asked
            while len(self._answers) > MAX_ANSWERS:
                self.forget(next(iter(self._answers)))
        if not asked.done() or local < self._answers[request_id][0]:
            return ExternalMatch("later")
        self._answers.pop(request_id, None)
        found = asked.result() * self._facts.block_size
        return ExternalMatch("hit", found) if found > num_local_tokens else ExternalMatch("miss")

    def forget(self, request_id: str) -> None:
        _, asked = self._answers.pop(request_id, (0, None))
        if asked is not None:
            asked.cancel()

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._store.close()

    def _count(self, hashes: Sequence[bytes], first: int) -> int:
        """Leading blocks that can be had when the engine has the first ones."""
        try:
            return self._longest(hashes, first)
        except Exception as error:
            self._patience.failed(error)
            raise

    def _longest(self, hashes: Sequence[bytes], first: int) -> int:
        facts, wanted = self._facts, hashes[first:]
        groups = range(len(facts.groups))
        keys = [block_key(facts, block_hash, group) for group in groups for block_hash in wanted]
        found = list(self._store.contains(keys)) if keys else []
        there = [found[group * len(wanted) : (group + 1) * len(wanted)] for group in groups]
        length = len(wanted)
        for group, blocks in zip(facts.groups, there, strict=True):
            if group.window is None:
                length = next((i for i in range(length) if not blocks[i]), length)
        shorter = True
        while length and shorter:  # the windows of the sliding groups must be there too
            shorter = False
            for group, blocks in zip(facts.groups, there, strict=True):
                if group.window is None:
                    continue
                reach = max(0, (first + length) * facts.block_size - group.window + 1) // facts.block_size
                gap = next((i for i in range(max(0, reach - first), length) if not blocks[i]), None)
                if gap is not None:
                    length, shorter = gap, True
        return first + length


class StoreTransfer:
    """`WorkerConnector` over a store: values are sealed with a checksum, and what does not pass it is a miss."""

    def __init__(self, store: KVStore, facts: KVFacts, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._facts = facts
        self._patience = _Patience(clock)
        self._reports: SimpleQueue[KVReport] = SimpleQueue()
        self._closing = threading.Event()
        self._loads = ThreadPoolExecutor(LOADERS, thread_name_prefix="infer-kv-load")
        self._saves = ThreadPoolExecutor(1, thread_name_prefix="infer-kv-save")
        self._blocks: KVBlocks | None = None

    def bind(self, blocks: KVBlocks) -> None:
        self._blocks = blocks

    def start(self, transfers: Sequence[KVTransfer]) -> None:
        for transfer in transfers:
            threads, move = (self._loads, self._load) if transfer.kind == "load" else (self._saves, self._save)
            threads.submit(self._run, transfer, move)

    def poll(self, timeout: float) -> list[KVReport]:
        found = []
        with suppress(Empty):
            if timeout > 0:
                found.append(self._reports.get(timeout=timeout))
            while True:
                found.append(self._reports.get_nowait())
        return found

    def close(self) -> None:
        self._closing.set()
        for threads in (self._loads, self._saves):
            threads.shutdown(wait=True, cancel_futures=True)
        self._store.close()

    def _run(self, transfer: KVTransfer, move: Callable[[KVBlocks, Sequence[KVBlock]], int]) -> None:
        """Piece by piece. Behind the first block that fails the rest of a load is of no use, and the rest of a save of
        little."""
        done, reason = 0, ""
        try:
            if self._blocks is None:
                raise RuntimeError("no cache was bound")
            for piece in self._pieces(transfer.blocks):
                if self._closing.is_set():
                    break
                self._patience.check()
                moved = move(self._blocks, piece)
                done += moved
                if moved < len(piece):
                    break
        except StoreDownError as error:
            reason = str(error)
        except Exception as error:
            self._patience.failed(error)
            reason = f"{type(error).__name__}: {error}"
        self._reports.put(KVReport(transfer.job_id, tuple(range(done, len(transfer.blocks))), reason))

    def _load(self, blocks: KVBlocks, piece: Sequence[KVBlock]) -> int:
        """-> how many of the first ones are in place."""
        keys = [block_key(self._facts, block.hash, block.group) for block in piece]
        values = self._store.get(keys)
        for done, (key, block, value) in enumerate(zip(keys, piece, values, strict=True)):
            data = unseal(key, value, self._facts.groups[block.group].block_bytes)
            if data is None or self._closing.is_set():
                return done
            blocks.write(block.group, block.block_id, data)
        return len(piece)

    def _save(self, blocks: KVBlocks, piece: Sequence[KVBlock]) -> int:
        keys = [block_key(self._facts, block.hash, block.group) for block in piece]
        there = self._store.contains(keys)
        values = {
            key: seal(key, blocks.read(block.group, block.block_id))
            for key, block, known in zip(keys, piece, there, strict=True)
            if not known
        }
        if values:
            self._store.put(values)
        return len(piece)

    def _pieces(self, blocks: Sequence[KVBlock]) -> Iterable[Sequence[KVBlock]]:
        piece: list[KVBlock] = []
        size = 0
        for block in blocks:
            num_bytes = self._facts.groups[block.group].block_bytes
            if piece and size + num_bytes > MAX_PIECE:
                yield piece
                piece, size = [], 0
            piece.append(block)
            size += num_bytes
        if piece:
            yield piece


def block_key(facts: KVFacts, block_hash: bytes, group: int) -> str:
    """Of one block of one group: letters, digits and dashes. What begins alike belongs to one model on one platform."""
    return f"{facts.namespace[:8].hex()}-{block_hash.hex()}-{group}"


def seal(key: str, data: bytes) -> bytes:
    """A value: what it is, a checksum over key and data, the data."""
    return b"".join((_MAGIC, _digest(key, data), data))


def unseal(key: str, value: bytes | None, num_bytes: int) -> bytes | None:
    """The data; None when the value is not, to the last bit, what was stored under this key."""
    if value is None or len(value) != SEAL_BYTES + num_bytes or value[: len(_MAGIC)] != _MAGIC:
        return None
    data = value[SEAL_BYTES:]
    return data if value[len(_MAGIC) : SEAL_BYTES] == _digest(key, data) else None


def _digest(key: str, data: bytes) -> bytes:
    digest = hashlib.blake2b(key.encode(), digest_size=_DIGEST)
    digest.update(data)
    return digest.digest()
