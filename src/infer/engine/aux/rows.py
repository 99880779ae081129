"""The captured rows that one choice holds: accepted by cursor, cut with its tokens, handed out without a copy.

Written by the loop task, read by the request's task on the same event loop. Owns the rows until `release`.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from infer.config.capture import CaptureProfile
from infer.types import CapturedRows

if TYPE_CHECKING:
    from infer.engine.step import AuxRows

CAPTURED, CACHED, RECOMPUTED = 0, 1, 2
"""Status of a row: `CapturedRows.status`."""

_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


class _Segment:
    """Rows of consecutive positions from `start` on, of every field, filled in order. Siblings may share one."""

    __slots__ = ("buffers", "capacity", "cursor", "row_bytes", "start", "status", "versions")

    def __init__(self, row_bytes: dict[str, int], start: int, capacity: int) -> None:
        self.row_bytes = row_bytes
        self.start = start
        self.capacity = capacity
        self.cursor = start
        """Position of the next row."""
        self.buffers: dict[str, mmap.mmap] = {}
        self.status = bytearray()
        self.versions: list[tuple[int, int]] = []
        """(rows, weight version), adjacent ones different."""

    @property
    def nbytes(self) -> int:
        return self.capacity * sum(self.row_bytes.values())

    def append(self, piece: AuxRows, end: int, recomputed_until: int) -> None:
        """Take the piece's rows from the cursor up to position `end`."""
        skip, count = self.cursor - piece.start, end - self.cursor
        if count <= 0:
            return
        for name, size in self.row_bytes.items():
            buffer = self.buffers.get(name) or self._allocate(name)
            at = (self.cursor - self.start) * size
            data = piece.data[name]
            buffer[at : at + count * size] = (
                data if count == piece.count else memoryview(data)[skip * size : (skip + count) * size]
            )
        cached = min(count, max(0, piece.num_cached - skip))
        recomputed = min(count - cached, max(0, recomputed_until - self.cursor - cached))
        if cached or recomputed:
            self.status += bytes([CACHED]) * cached + bytes([RECOMPUTED]) * recomputed
        self.status += bytes(count - cached - recomputed)
        _extend(self.versions, _cut(piece.versions, skip, skip + count))
        self.cursor = end

    def view(self, name: str, end: int) -> memoryview:
        """The rows of a field up to position `end`."""
        buffer = self.buffers.get(name)
        if buffer is None or end <= self.start:
            return memoryview(b"")
        return memoryview(buffer).toreadonly()[: (end - self.start) * self.row_bytes[name]]

    def _allocate(self, name: str) -> mmap.mmap:
        """Room for every row there can be: address space only, a page costs memory when it is written."""
        size = self.capacity * self.row_bytes[name]
        buffer = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):  # a huge page would cost 2 MiB for the first row
            buffer.madvise(mmap.MADV_NOHUGEPAGE)
        self.buffers[name] = buffer
        return buffer


class RequestRows:
    """Rows [start, N - 1) of a sequence of N tokens, one set per captured field; the last token is never fed.

    A row is accepted once, in order: `cursor` is the next position. What cannot be right (a gap, a wrong size, an error
    of the worker) fails the rows, never the request: `failure` says why and nothing is accepted any more.
    """

    def __init__(self, profiles: Sequence[CaptureProfile], *, prompt_len: int, max_tokens: int, start: int = 0) -> None:
        """`start`, 0 to `prompt_len`: position of the first row that is wanted."""
        self.profiles = tuple(profiles)
        self.start = start
        self.prompt_len = prompt_len
        self.max_tokens = max_tokens
        self.failure: str | None = None
        self.num_tokens = prompt_len
        """Tokens that the rows go with: those accepted so far, or what `trim` left of them."""
        self.computed_until = 0
        """Positions below it were computed, up to the end of the last stay in a slot."""
        self.recomputed_until = 0
        """The same as of the begin of this stay: what comes from it was computed before."""
        self._accepted = False
        self._trimmed: int | None = None
        self._shared: _Segment | None = None
        """Of a sibling: where the rows of the prompt are (only those are its own, too)."""
        self._row_bytes = {profile.name: profile.row_bytes for profile in self.profiles}
        self._own: _Segment | None = _Segment(self._row_bytes, start, prompt_len + max_tokens - 1 - start)

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(self._row_bytes)

    @property
    def cursor(self) -> int:
        """Position of the first row that is still needed."""
        if self._shared is not None and self._shared.cursor < self.prompt_len:
            return self._shared.cursor
        return self.start if self._own is None else self._own.cursor

    @property
    def count(self) -> int:
        """Rows that belong to the tokens so far."""
        return max(0, min(self.cursor, self.num_tokens - 1) - self.start)

    @property
    def nbytes(self) -> int:
        """Most bytes that these rows can take, a shared prompt not counted."""
        return 0 if self._own is None else self._own.nbytes

    def sibling(self) -> RequestRows:
        """Rows of another choice of the same prompt: the prompt's rows are stored once, whoever brings them first."""
        other = RequestRows(self.profiles, prompt_len=self.prompt_len, max_tokens=self.max_tokens, start=self.start)
        other._shared = self._shared or self._own
        other._own = _Segment(self._row_bytes, self.prompt_len, self.max_tokens - 1)
        other.failure = self.failure
        return other

    def accept(self, piece: AuxRows | None, num_tokens: int) -> None:
        """Take what a step emitted with the tokens that make the sequence `num_tokens` long.

        Rows in front of the cursor are held already and rows behind the tokens belong to nothing: both are cut. After
        that the rows must reach the last token but one.
        """
        if self._own is None or not self._take(piece, num_tokens):
            return
        self._accepted = True
        self.num_tokens = num_tokens if self._trimmed is None else min(num_tokens, self._trimmed)

    def accept_prompt(self, piece: AuxRows | None) -> None:
        """Of a fork: its parent's rows of the step that ended the prompt, should the parent not have taken them."""
        if self._own is not None and self.cursor < self.prompt_len:
            self._take(piece, self.prompt_len + 1)

    def trim(self, num_tokens: int) -> None:
        """Cut to what belongs to the first `num_tokens` tokens. What is accepted later stays out."""
        self._trimmed = num_tokens if self._trimmed is None else min(self._trimmed, num_tokens)
        self.num_tokens = min(self.num_tokens, num_tokens)

    def fail(self, reason: str) -> None:
        """The rows cannot be complete any more; the first reason stays."""
        if self.failure is None:
            self.failure = reason

    def view(self, name: str) -> memoryview:
        """The rows of a field in C order, read-only; no copy, unless the prompt's are a sibling's."""
        end = self.start + self.count
        parts = [segment.view(name, end) for segment, end in self._parts(end)]
        filled = [part for part in parts if len(part)]
        if len(filled) > 1:
            return memoryview(b"".join(filled))
        return filled[0] if filled else memoryview(b"")

    def export(self) -> dict[str, CapturedRows]:
        """Field -> its rows, or the reason why there are none. Views stay valid after `release`."""
        reason = self.failure
        if reason is None and self._own is None:
            reason = "the rows were released"
        if reason is None and not self._accepted:
            reason = "the request ended before its first token: no row was delivered"
        count = 0 if reason else self.count
        status = b"".join(bytes(s.status[: max(0, end - s.start)]) for s, end in self._parts(self.start + count))
        return {
            profile.name: CapturedRows(
                field=profile.name,
                start=self.start,
                count=count,
                data=self.view(profile.name) if count else b"",
                dtype=profile.dtype,
                row_shape=profile.row_shape,
                layer_ids=profile.layer_ids,
                num_experts=profile.num_experts,
                status=status,
                versions=self.versions if count else (),
                error=reason,
            )
            for profile in self.profiles
        }

    @property
    def versions(self) -> tuple[tuple[int, int], ...]:
        """(rows, weight version under which they were computed), together `count`."""
        spans = [
            span
            for segment, end in self._parts(self.start + self.count)
            for span in _cut(segment.versions, 0, end - segment.start)
        ]
        joined: list[tuple[int, int]] = []
        _extend(joined, spans)
        return tuple(joined)

    def release(self) -> None:
        """Give up the rows. Memory goes when no view of it is left."""
        self._own = self._shared = None

    def _parts(self, end: int) -> Iterable[tuple[_Segment, int]]:
        """Segments of the rows up to position `end`, each with where its part ends."""
        if self._own is None:
            return
        if self._shared is not None:
            yield self._shared, min(end, self.prompt_len)
        yield self._own, end

    def _take(self, piece: AuxRows | None, num_tokens: int) -> bool:
        """Add the piece's rows; False if the rows have failed."""
        if self.failure is None and piece is not None:
            self.failure = self._wrong(piece) or self._append(piece, min(piece.start + piece.count, num_tokens - 1))
        if self.failure is None and self.cursor < num_tokens - 1:
            self.fail(f"rows end at position {self.cursor}: {num_tokens} tokens need them up to {num_tokens - 1}")
        return self.failure is None

    def _append(self, piece: AuxRows, end: int) -> str | None:
        """Why the piece does not fit, if it does not."""
        if piece.start > self.cursor:
            return f"rows start at position {piece.start}, where {self.cursor} is next"
        try:
            for segment, until in self._parts(end):
                if piece.start <= segment.cursor:
                    segment.append(piece, min(until, segment.start + segment.capacity), self.recomputed_until)
        except (OSError, ValueError, MemoryError) as error:
            return f"no memory for the rows: {error}"
        return None

    def _wrong(self, piece: AuxRows) -> str | None:
        """Why a piece cannot be what it says, or the error that it carries."""
        if piece.error is not None:
            return piece.error
        if piece.start < 0 or piece.count < 0 or not 0 <= piece.num_cached <= piece.count:
            return f"{piece.count} rows from position {piece.start}, {piece.num_cached} of them cached: not possible"
        covered = piece.versions[0][0] if len(piece.versions) == 1 else sum(rows for rows, _ in piece.versions)
        if covered != piece.count:
            return f"weight versions {piece.versions} do not cover {piece.count} rows"
        for name, size in self._row_bytes.items():
            data = piece.data.get(name)
            if data is None:
                return f"no rows of {name} came"
            if len(data) != piece.count * size:
                return f"{len(data)} bytes are not {piece.count} rows of {name} ({size} each)"
        return None


def _cut(spans: Iterable[tuple[int, int]], first: int, end: int) -> list[tuple[int, int]]:
    """The part of (rows, version) spans that covers rows first to end."""
    out, at = [], 0
    for rows, version in spans:
        begin, stop = max(first, at), min(end, at + rows)
        if begin < stop:
            out.append((stop - begin, version))
        at += rows
    return out


def _extend(spans: list[tuple[int, int]], more: Iterable[tuple[int, int]]) -> None:
    """Append (rows, version) spans; neighbours of one version become one."""
    for rows, version in more:
        if spans and spans[-1][1] == version:
            spans[-1] = (spans[-1][0] + rows, version)
        else:
            spans.append((rows, version))
