"""The pool of fixed-size KV blocks of one group: reference counts, content hashes, least-recently-used reuse.

Runs in the loop task. Sole writer of reference counts. Block 0 is the null block and is never handed out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from infer.errors import EngineError

NULL_BLOCK = 0


class KVEvent(NamedTuple):
    """A change of the cache map: hashes that became findable, were overwritten, or all of them (cleared)."""

    kind: Literal["stored", "removed", "cleared"]
    hashes: tuple[bytes, ...] = ()


class BlockPool:
    """`num_blocks` usable blocks with ids 1..num_blocks.

    A block with no owner waits in the free queue and keeps its hash until it is handed out again (lazy eviction).
    Reuse order: unhashed blocks given back, then never-used ones, then hashed ones, longest unused first and each
    sequence from its tail.
    """

    def __init__(self, num_blocks: int, *, record_events: bool = False) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._ref_counts = [0] * (num_blocks + 1)
        self._hashes: list[bytes | None] = [None] * (num_blocks + 1)
        self._by_hash: dict[bytes, int] = {}
        # The free queue is a doubly linked ring through entry 0, so that a hit can leave from its middle in O(1).
        self._next = [*range(1, num_blocks + 1), 0]
        self._previous = [num_blocks, *range(num_blocks)]
        self._events: list[KVEvent] | None = [] if record_events else None

    @property
    def num_in_use(self) -> int:
        return self.num_blocks - self.num_free

    def find(self, block_hash: bytes) -> int | None:
        """The block that holds this content, whether it is in use or waiting for reuse."""
        return self._by_hash.get(block_hash)

    def num_idle(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks have no owner: taking them uses up free blocks."""
        return sum(1 for block_id in block_ids if block_id and not self._ref_counts[block_id])

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks from the head of the free queue; what they held is forgotten."""
        if count > self.num_free:
            raise EngineError(f"asked for {count} KV blocks with {self.num_free} free: the caller must check first")
        taken: list[int] = []
        removed: list[bytes] = []
        for _ in range(count):
            block_id = self._next[0]
            self._unlink(block_id)
            old = self._hashes[block_id]
            if old is not None:
                self._forget(block_id, old)
                removed.append(old)
            self._ref_counts[block_id] = 1
            taken.append(block_id)
        if removed and self._events is not None:
            self._events.append(KVEvent("removed", tuple(removed)))
        return taken

    def share(self, block_ids: Iterable[int]) -> None:
        """One more owner for each block; null blocks are passed over."""
        for block_id in block_ids:
            if not block_id:
                continue
            if self._ref_counts[block_id] == 0:
                self._unlink(block_id)
            self._ref_counts[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """One owner less for each block of a sequence, given head first; null blocks are passed over."""
        counts = self._ref_counts
        for block_id in reversed(block_ids):
            if not block_id:
                continue
            if counts[block_id] <= 0:
                raise EngineError(f"KV block {block_id} was freed more often than it was taken")
            counts[block_id] -= 1
            if counts[block_id] == 0:
                self._link(block_id, front=self._hashes[block_id] is None)

    def register(self, block_ids: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Make full blocks findable by content. A content that another block already holds stays with that block."""
        stored: list[bytes] = []
        for block_id, block_hash in zip(block_ids, hashes, strict=True):
            if block_id and self._hashes[block_id] is None and block_hash not in self._by_hash:
                self._hashes[block_id] = block_hash
                self._by_hash[block_hash] = block_id
                stored.append(block_hash)
        if stored and self._events is not None:
            self._events.append(KVEvent("stored", tuple(stored)))

    def unregister(self, block_ids: Iterable[int]) -> None:
        """Forget contents that turned out not to be computed (a failed step)."""
        removed: list[bytes] = []
        for block_id in block_ids:
            old = self._hashes[block_id]
            if old is None:
                continue
            self._forget(block_id, old)
            removed.append(old)
            if self._ref_counts[block_id] == 0:
                self._unlink(block_id)
                self._link(block_id, front=True)
        if removed and self._events is not None:
            self._events.append(KVEvent("removed", tuple(removed)))

    def reset(self) -> bool:
        """Forget all contents. Refused (False) while any block is in use."""
        if self.num_in_use:
            return False
        self._hashes = [None] * (self.num_blocks + 1)
        self._by_hash.clear()
        if self._events is not None:
            self._events.append(KVEvent("cleared"))
        return True

    def take_events(self) -> list[KVEvent]:
        """Events since the last call; empty unless recording was asked for."""
        events = self._events or []
        if events:
            self._events = []
        return events

    def reuse_order(self) -> list[int]:
        """Free blocks in the order they will be handed out (for tests and inspection)."""
        order = []
        block_id = self._next[0]
        while block_id:
            order.append(block_id)
            block_id = self._next[block_id]
        return order

    def _forget(self, block_id: int, block_hash: bytes) -> None:
        self._hashes[block_id] = None
        del self._by_hash[block_hash]

    def _unlink(self, block_id: int) -> None:
        before, after = self._previous[block_id], self._next[block_id]
        self._next[before] = after
        self._previous[after] = before
        self.num_free -= 1

    def _link(self, block_id: int, *, front: bool) -> None:
        before = 0 if front else self._previous[0]
        after = self._next[before]
        self._next[before] = self._previous[after] = block_id
        self._previous[block_id], self._next[block_id] = before, after
        self.num_free += 1
