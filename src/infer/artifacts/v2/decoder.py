"""From stored bytes to header and chunks, strictly: every limit before every allocation, every deviation an
`ArtifactCorruptError`. Pure; runs on any thread."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from infer.artifacts.reading import sound
from infer.artifacts.v1.limits import align64
from infer.artifacts.v2 import header as wire
from infer.artifacts.v2.facts import check_facts
from infer.artifacts.v2.limits import (
    ITEM_BYTES,
    MAGIC,
    MAJOR,
    MINOR,
    PRELUDE,
    PRELUDE_BYTES,
    Limits,
    box_shape,
    chunk_box,
    chunk_count,
)
from infer.artifacts.v2.values import DTYPES
from infer.errors import ArtifactCorruptError

_MAX_WINDOW = 1 << 27


@dataclass(frozen=True, slots=True)
class Prelude:
    """The first 64 bytes."""

    header_bytes: int
    header_sha256: bytes

    @property
    def payload_start(self) -> int:
        return align64(PRELUDE_BYTES + self.header_bytes)


@dataclass(frozen=True, slots=True)
class Chunk:
    """One stored chunk: where it is, what it must hash to, and the box of the array that it holds."""

    array: wire.Array
    start: int
    end: int
    sha256: bytes
    box: tuple[int, int, int, int]


def read_prelude(head: bytes | memoryview, total: int, limits: Limits) -> Prelude:
    """`head` is the first 64 bytes of an object of `total` bytes."""
    if len(head) < PRELUDE_BYTES:
        raise ArtifactCorruptError(f"{total} bytes; an artifact has at least {PRELUDE_BYTES}")
    magic, major, minor, header_bytes, size, digest, zero = PRELUDE.unpack_from(head)
    if magic != MAGIC:
        raise ArtifactCorruptError("these bytes are not a generation artifact (wrong magic)")
    if (major, minor) != (MAJOR, MINOR):
        raise ArtifactCorruptError(f"version {major}.{minor}; this reader knows {MAJOR}.{MINOR}")
    if size != total:
        raise ArtifactCorruptError(f"the object has {total} bytes and says {size}")
    if header_bytes > limits.header_bytes:
        raise ArtifactCorruptError(f"a header of {header_bytes} bytes; at most {limits.header_bytes} are accepted")
    if zero or not header_bytes or align64(PRELUDE_BYTES + header_bytes) > total:
        raise ArtifactCorruptError(f"a header of {header_bytes} bytes does not fit, or the last 8 bytes are not zero")
    return Prelude(header_bytes, digest)


def read_header(head: bytes | memoryview, prelude: Prelude, total: int, limits: Limits) -> wire.Header:
    """`head` is everything between prelude and payload. Checks digest, padding, canonical form, schema, facts, places."""
    data = bytes(head[: prelude.header_bytes])
    if len(head) != prelude.payload_start - PRELUDE_BYTES or any(head[prelude.header_bytes :]):
        raise ArtifactCorruptError("the padding behind the header is not zero")
    if hashlib.sha256(data).digest() != prelude.header_sha256:
        raise ArtifactCorruptError("the header's SHA-256 is not the one in front of it")
    header = wire.unpack(data)
    for name in ("chunk_bytes", "chunks", "decoded_bytes", "fields"):
        declared, allowed = getattr(header.limits, name), getattr(limits, name)
        if declared > allowed:
            raise ArtifactCorruptError(f"the artifact declares {name}={declared}; this reader accepts {allowed}")
    sound(lambda: check_facts(header))
    _check_storage(header, prelude.payload_start, total)
    return header


def _check_storage(header: wire.Header, start: int, total: int) -> None:
    """Arrays lie one behind the other without gaps, and take exactly what the header declares."""
    end, found = start, {"chunk_bytes": 0, "chunks": 0, "decoded_bytes": 0, "fields": len(header.fields)}
    for field in header.fields:
        for name, array in field.arrays.items():
            where = f"{field.name}.{name}"
            stored = array.stored_bytes
            if array.codec is None or array.offset is None or stored is None or len(array.sha256) != 32:
                raise ArtifactCorruptError(f"array {where} does not say how it is stored")
            if array.offset != align64(end):
                raise ArtifactCorruptError(f"array {where} lies at {array.offset} instead of {align64(end)}")
            end = array.offset + stored
            count = _check_chunks(where, array, stored)
            found["chunks"] += count
            found["decoded_bytes"] += array.raw_bytes
            found["chunk_bytes"] = max(found["chunk_bytes"], prod(array.cut) * ITEM_BYTES[array.dtype])
    if end != total:
        raise ArtifactCorruptError(f"the arrays end at {end} of {total} bytes")
    for name, value in found.items():
        if getattr(header.limits, name) != value:
            raise ArtifactCorruptError(f"the header declares {name}={getattr(header.limits, name)} and needs {value}")


def _check_chunks(where: str, array: wire.Array, stored: int) -> int:
    if array.chunk_shape:
        fits = len(array.chunk_shape) == len(array.shape) and all(
            1 <= part <= extent for part, extent in zip(array.chunk_shape, array.shape, strict=True)
        )
        if not fits or array.chunk_shape[2:] != array.shape[2:]:
            raise ArtifactCorruptError(
                f"array {where} of shape {array.shape[:4]} cannot be cut into {array.chunk_shape[:4]}"
            )
    count = chunk_count(array.shape, array.cut)
    if (count > 1) != bool(array.chunk_shape) or len(array.chunks) != (count if count > 1 else 0):
        raise ArtifactCorruptError(f"array {where} lists {len(array.chunks)} chunks and has {count}")
    if not count and (array.codec != "none" or stored):
        raise ArtifactCorruptError(f"array {where} has no elements and stores {stored} bytes")
    end = 0
    for size, digest in array.chunks:
        end = align64(end) + size
        if not size or len(digest) != 32:
            raise ArtifactCorruptError(f"array {where} has a chunk of {size} bytes, or without a SHA-256")
    if array.chunks and end != stored:
        raise ArtifactCorruptError(f"array {where}: its chunks take {end} bytes and it says {stored}")
    for chunk in chunks_of(array):
        raw = prod(box_shape(array.shape, chunk.box)) * ITEM_BYTES[array.dtype]
        if array.codec == "none" and chunk.end - chunk.start != raw:
            raise ArtifactCorruptError(f"array {where}: a chunk of {raw} bytes is stored in {chunk.end - chunk.start}")
    return count


def chunks_of(array: wire.Array) -> Iterator[Chunk]:
    """In the order in which they are stored."""
    count, start = chunk_count(array.shape, array.cut), array.offset or 0
    for number in range(count):
        size, digest = array.chunks[number] if array.chunks else (array.stored_bytes or 0, array.sha256)
        yield Chunk(array, start, start + size, digest, chunk_box(array.shape, array.cut, number))
        start = align64(start + size)


def decode_chunk(stored: bytes | memoryview, chunk: Chunk) -> NDArray[Any]:
    """The values of a chunk, read-only. The digest comes first: nothing else looks at bytes that are not what was written."""
    if hashlib.sha256(stored).digest() != chunk.sha256:
        raise ArtifactCorruptError(f"the chunk at {chunk.start} has another SHA-256 than the header says")
    array, shape = chunk.array, box_shape(chunk.array.shape, chunk.box)
    size = prod(shape) * ITEM_BYTES[array.dtype]
    raw = _decompress(stored, size) if array.codec == "zstd" else stored
    values = np.frombuffer(raw, DTYPES[array.dtype])
    if not values.flags.aligned:
        values = values.copy()
    values = values.reshape(shape)
    values.flags.writeable = False
    return values


def _decompress(stored: bytes | memoryview, size: int) -> bytes:
    """One frame of exactly `size` bytes: its header promises that before anything is decompressed, since an output limit
    given to the library is ignored when the frame carries a size."""
    try:
        frame = zstandard.get_frame_parameters(stored)
    except zstandard.ZstdError:
        raise ArtifactCorruptError("a chunk does not begin with a zstd frame") from None
    if frame.dict_id != 0 or frame.content_size != size:
        raise ArtifactCorruptError(
            f"a zstd frame declares dictionary {frame.dict_id} and {frame.content_size} bytes instead of 0 and {size}"
        )
    decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
    try:
        raw = decompressor.decompress(stored, max_output_size=size, allow_extra_data=False)
    except (zstandard.ZstdError, ValueError, MemoryError) as error:
        raise ArtifactCorruptError(f"a zstd frame is damaged: {str(error)[:200]}") from None
    if len(raw) != size:
        raise ArtifactCorruptError(f"a zstd frame holds {len(raw)} bytes instead of {size}")
    return raw
