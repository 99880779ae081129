"""The rows of one capture: one stay of one request in a slot. Positions in, complete blocks and emitted rows out.

Used on the worker thread; owns the rows from when they are computed until they are both published and emitted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from infer.engine.step import AuxBegin, AuxRows


@dataclass(frozen=True, slots=True)
class CompleteBlock:
    """A block whose rows are all here and whose hash is known, for the first time."""

    index: int
    kv_hash: bytes
    version: int
    """Under which its rows were computed (the last one's, if they differ)."""
    publishable: bool
    """False: its rows were computed under two weight versions, or cannot be trusted."""


class Capture:
    """Rows [first, end) are or were held; [base, end) still are. An error is final, and no row leaves after it."""

    def __init__(self, begin: AuxBegin, version: int, block_size: int, row_bytes: Mapping[str, int]) -> None:
        """`version` is the one that the request's cached blocks were looked up under; `row_bytes` is per field."""
        self.slot = begin.slot
        self.parent: Capture | None = None
        self.error: str | None = None
        self.end = begin.start
        self.first = begin.start
        """Rows in front of it come from the store."""
        self.next_emitted = begin.emit_from
        self.hashes = list(begin.hashes)
        self.row_bytes = dict(row_bytes)
        self.cached_version = version
        self._block_size = block_size
        self._base = begin.start
        self._next_block = -(-begin.start // block_size)
        self._rows = {name: bytearray() for name in row_bytes}
        self._spans: list[tuple[int, int]] = []
        """(end position, version) of neighbouring rows from `first` on."""

    def fail(self, reason: str) -> None:
        """The first reason counts. What is held is dropped."""
        if self.error is None:
            self.error = reason
            for rows in self._rows.values():
                rows.clear()

    def append(self, start: int, count: int, rows: Mapping[str, memoryview], version: int) -> None:
        """Rows of the positions start .. start + count of a step."""
        if self.error is not None:
            return
        if start != self.end:
            self.fail(f"rows of position {self.end} were expected, the step computed {start} to {start + count - 1}")
            return
        for name, size in self.row_bytes.items():
            if len(rows[name]) != count * size:
                self.fail(f"{name}: {len(rows[name])} bytes were captured for {count} rows of {size}")
                return
        for name in self.row_bytes:
            self._rows[name] += rows[name]
        self.end += count
        self._extend_spans(self.end, version)

    def take_over(self) -> None:
        """What a fork shares with its parent and no complete block holds: the rows of its last, incomplete block."""
        parent, self.parent = self.parent, None
        if parent is None or self.error is not None:
            return
        tail = self.end // self._block_size * self._block_size
        if parent.error is not None:
            self.fail(parent.error)
        elif tail < parent._base or parent.end < self.end:
            self.fail(f"its parent does not hold rows {tail} to {self.end}")
        else:
            for name in self.row_bytes:
                self._rows[name] += parent._held(name, tail, self.end)
            self.first = self._base = tail
            self._next_block = tail // self._block_size
            position = tail
            for count, version in parent._versions(tail, self.end):
                position += count
                self._extend_spans(position, version)

    def complete_blocks(self, version: int) -> Iterator[CompleteBlock]:
        """Blocks not told before, in order; `version` stands in for rows that are not here."""
        size = self._block_size
        while self._next_block < len(self.hashes):
            index = self._next_block
            if self.error is None and self.end < (index + 1) * size:
                return
            self._next_block += 1
            versions = [] if self.error else self._versions(index * size, (index + 1) * size)
            yield CompleteBlock(
                index=index,
                kv_hash=self.hashes[index],
                version=versions[-1][1] if versions else version,
                publishable=len(versions) == 1,
            )

    def block(self, name: str, index: int) -> bytes:
        """The rows of a complete block that `trim` has not dropped."""
        return bytes(self._held(name, index * self._block_size, (index + 1) * self._block_size))

    def emit(self, cached: Mapping[str, bytes]) -> AuxRows:
        """Everything up to the last row, not emitted before. `cached` are the rows [next_emitted, first), if any."""
        start, self.next_emitted = self.next_emitted, max(self.end, self.next_emitted)
        num_cached = max(0, self.first - start)
        own = max(start, self.first)
        count = max(0, self.end - start)
        versions = self._versions(own, self.end)
        if num_cached and versions and versions[0][1] == self.cached_version:
            versions[0] = (versions[0][0] + num_cached, self.cached_version)
        elif num_cached:
            versions.insert(0, (num_cached, self.cached_version))
        data = {name: bytes(self._held(name, own, self.end)) if count else b"" for name in self.row_bytes}
        if num_cached:
            data = {name: cached[name] + rows for name, rows in data.items()}
        return AuxRows(start=start, count=count, num_cached=num_cached, data=data, versions=versions)

    def failure(self) -> AuxRows:
        """What is emitted instead of rows behind an error."""
        empty = dict.fromkeys(self.row_bytes, b"")
        return AuxRows(self.next_emitted, count=0, num_cached=0, data=empty, versions=[], error=self.error)

    def trim(self) -> None:
        """Forget rows that were published and emitted, a block at a time."""
        keep = min(self.next_emitted, self._next_block * self._block_size)
        drop = min(keep, self.end) - self._base
        if drop < self._block_size or self.error is not None:
            return
        for name, size in self.row_bytes.items():
            del self._rows[name][: drop * size]
        self._base += drop

    def _held(self, name: str, start: int, stop: int) -> bytearray:
        size, base = self.row_bytes[name], self._base
        return self._rows[name][(start - base) * size : (stop - base) * size]

    def _extend_spans(self, end: int, version: int) -> None:
        if self._spans and self._spans[-1][1] == version:
            self._spans.pop()
        self._spans.append((end, version))

    def _versions(self, start: int, stop: int) -> list[tuple[int, int]]:
        """(rows, version) of the own rows [start, stop)."""
        found = []
        for end, version in self._spans:
            count = min(end, stop) - start
            if count > 0:
                found.append((count, version))
                start += count
        return found
