"""One pass over a whole object in bounded memory: every digest, every padding byte, the values of every known field.

Runs on any thread; holds one window of the object and one decoded chunk.
"""

from __future__ import annotations

import hashlib

from infer.artifacts.byte_source import ByteSource
from infer.artifacts.reading import sound
from infer.artifacts.v2 import header as wire
from infer.artifacts.v2.decoder import Prelude, chunks_of, decode_chunk
from infer.artifacts.v2.limits import PRELUDE_BYTES
from infer.artifacts.v2.values import EntryCheck
from infer.errors import ArtifactCorruptError

_WINDOW = 1 << 21


class _Sequential:
    """Ranges in rising order, fetched a window at a time and hashed as they pass."""

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._start = self._end = self._next = 0
        self._window: memoryview = memoryview(b"")
        self.digest = hashlib.sha256()

    def take(self, end: int) -> memoryview:
        """Everything from where the last call ended up to `end`."""
        start = self._next
        if end > self._end:
            self._window = memoryview(b"")  # before the next one comes
            self._start, self._end = start, min(self._source.size, max(end, start + _WINDOW))
            self._window = memoryview(self._source.read(self._start, self._end))
        piece = self._window[start - self._start : end - self._start]
        self._next = end
        self.digest.update(piece)
        return piece


def verify_object(source: ByteSource, header: wire.Header, prelude: Prelude) -> tuple[str, str]:
    """SHA-256 of the object and of its content, in hex. Raises `ArtifactCorruptError`."""
    stream = _Sequential(source)
    body = hashlib.sha256(wire.pack_facts(header))
    front = stream.take(prelude.payload_start)
    if hashlib.sha256(front[PRELUDE_BYTES : PRELUDE_BYTES + prelude.header_bytes]).digest() != prelude.header_sha256:
        raise ArtifactCorruptError("the header has changed since it was read")
    for field in header.fields:
        check = EntryCheck(field)
        for name, array in field.arrays.items():
            _padding(stream.take(array.offset or 0))
            whole = hashlib.sha256()
            for chunk in chunks_of(array):
                gap = stream.take(chunk.start)
                _padding(gap)
                stored = stream.take(chunk.end)
                whole.update(gap)
                whole.update(stored)
                values = decode_chunk(stored, chunk)
                body.update(values.reshape(-1).view("u1").data)
                sound(lambda: check.chunk(name, values, chunk.box))  # noqa: B023  called here
            if whole.digest() != array.sha256:
                raise ArtifactCorruptError(f"array {field.name}.{name} has another SHA-256 than the header says")
    return stream.digest.hexdigest(), body.hexdigest()


def _padding(data: memoryview) -> None:
    if any(data):
        raise ArtifactCorruptError("padding between two arrays is not zero")
