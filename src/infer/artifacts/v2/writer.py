"""Writes `generation_artifact_v2`: one chunk at a time into a spool, then the header, then the spool behind it.

Runs on any thread; beside the captured rows it holds one chunk.
"""

from __future__ import annotations

import hashlib
import io
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import IO, Any, Protocol

import msgspec
import zstandard

from infer.artifacts.record import FINISH_REASONS, GenerationRecord, ParentReference
from infer.artifacts.v1.limits import align64
from infer.artifacts.v1.semantics import malformed, too_large
from infer.artifacts.v2 import header as wire
from infer.artifacts.v2.facts import check_facts
from infer.artifacts.v2.limits import (
    CHUNK_BYTES,
    DEFAULT_LIMITS,
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
    chunk_shape,
)
from infer.artifacts.v2.segments import ArrayRows, Segment, described_choice, plan
from infer.artifacts.v2.values import EntryCheck
from infer.errors import ArtifactError

_PIECE = 1 << 18
_SPOOL_IN_MEMORY = 1 << 18


class Sink(Protocol):
    """Takes the object in order; nothing is sought."""

    def write(self, data: bytes, /) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What a receipt says of an object."""

    actual_bytes: int
    sha256: str
    body_sha256: str
    """Of the facts and the decoded chunks: depends neither on the codec nor on the zstd version."""
    header_sha256: str
    field_sha256: tuple[tuple[str, str], ...]
    """Name of a field, and SHA-256 over the digests of its arrays in table order."""
    completion_counts: tuple[int, ...]
    header_bytes: int
    raw_bytes: int

    def reference(self, *, token_count: int, fields: tuple[str, ...], choice_index: int = 0) -> ParentReference:
        """For the child that continues a choice of this artifact and repeats none of the rows of `fields`."""
        return ParentReference(
            choice_index=choice_index,
            fields=tuple(sorted(fields)),
            header_sha256=bytes.fromhex(self.header_sha256),
            sha256=bytes.fromhex(self.sha256),
            token_count=token_count,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedV2(Written):
    """A finished object in memory."""

    data: bytes


def encode_v2(
    record: GenerationRecord,
    *,
    codec: wire.Codec = "zstd",
    chunk_bytes: int = CHUNK_BYTES,
    limits: Limits = DEFAULT_LIMITS,
) -> EncodedV2:
    """The object as bytes. Raises `ArtifactError` (`artifact_capture_failed`, `artifact_too_large`)."""
    out = io.BytesIO()
    written = write_v2(record, out, codec=codec, chunk_bytes=chunk_bytes, limits=limits)
    values = {name: getattr(written, name) for name in Written.__dataclass_fields__}
    return EncodedV2(data=out.getvalue(), **values)


def write_v2(
    record: GenerationRecord,
    file: Sink,
    *,
    codec: wire.Codec = "zstd",
    chunk_bytes: int = CHUNK_BYTES,
    limits: Limits = DEFAULT_LIMITS,
    spool: IO[bytes] | None = None,
) -> Written:
    """Write a record of any size to `file`, in order.

    Chunks are first written to `spool` (any seekable file, empty; None: a temporary file), because the header, which holds
    their sizes and digests, comes first. Nothing reaches `file` unless the record is sound. Raises `ArtifactError`.
    """
    if codec not in ("none", "zstd"):
        raise malformed(f"codec={codec!r}; it must be 'zstd' or 'none'")
    segments = plan(record)
    facts = wire.Header(
        choices=tuple(described_choice(choice) for choice in record.choices),
        fields=tuple(_cut(segment, chunk_bytes) for segment in segments),
        limits=_totals(segments, chunk_bytes),
        provenance=record.provenance,
        parent=record.parent,
    )
    _check(facts, limits)
    if spool is not None:
        return _write(facts, segments, codec, spool, file, limits)
    with tempfile.SpooledTemporaryFile(_SPOOL_IN_MEMORY) as temporary:
        return _write(facts, segments, codec, temporary, file, limits)


def _cut(segment: Segment, chunk_bytes: int) -> wire.Field:
    """The entry with its chunk shapes."""
    arrays = {}
    for name, array in segment.field.arrays.items():
        shape = chunk_shape(array.shape, ITEM_BYTES[array.dtype], chunk_bytes)
        arrays[name] = msgspec.structs.replace(array, chunk_shape=() if shape == array.shape else shape)
    return msgspec.structs.replace(segment.field, arrays=arrays)


def _totals(segments: list[Segment], chunk_bytes: int) -> wire.Totals:
    arrays = [array for segment in segments for array in segment.field.arrays.values()]
    shapes = [chunk_shape(array.shape, ITEM_BYTES[array.dtype], chunk_bytes) for array in arrays]
    sizes = [prod(shape) * ITEM_BYTES[array.dtype] for array, shape in zip(arrays, shapes, strict=True)]
    return wire.Totals(
        chunk_bytes=max(sizes, default=0),
        chunks=sum(chunk_count(array.shape, shape) for array, shape in zip(arrays, shapes, strict=True)),
        decoded_bytes=sum(array.raw_bytes for array in arrays),
        fields=len(segments),
    )


def _check(facts: wire.Header, limits: Limits) -> None:
    check_facts(facts)
    for name in ("chunk_bytes", "chunks", "decoded_bytes", "fields"):
        needed, allowed = getattr(facts.limits, name), getattr(limits, name)
        if needed > allowed:
            raise too_large(f"the artifact needs {name}={needed}; at most {allowed} are allowed")
    for choice in facts.choices:
        if choice.finish_reason is not None and choice.finish_reason not in FINISH_REASONS:
            raise malformed(f"finish_reason={choice.finish_reason!r}; one of {', '.join(FINISH_REASONS)}")
    try:  # the header holds only what the schema knows
        data = wire.pack(facts)
        known = msgspec.msgpack.decode(data, type=wire.Header)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        raise malformed(f"provenance or attributes hold what the header cannot: {str(error)[:200]}") from None
    if wire.pack(known) != data or not wire.finite(known):
        raise malformed("provenance or attributes hold a number that is not finite, or a value of another type")


def _write(
    facts: wire.Header, segments: list[Segment], codec: wire.Codec, spool: Any, file: Sink, limits: Limits
) -> Written:
    body = hashlib.sha256(wire.pack_facts(facts))
    fields, end = [], 0
    try:
        for field, segment in zip(facts.fields, segments, strict=True):
            arrays, check = {}, EntryCheck(field)
            for name, array in field.arrays.items():  # in the order of their names
                end = _pad(spool, end)
                stored = _store(array, segment.arrays[name], codec, spool, end, body.update, check)
                arrays[name], end = stored, end + (stored.stored_bytes or 0)
            fields.append(msgspec.structs.replace(field, arrays=arrays))
    except OSError as error:
        raise ArtifactError(
            f"the spool cannot be written ({type(error).__name__}: {error}); is the disk full?",
            code="artifact_capture_failed",
        ) from error
    head, placed = _placed(msgspec.structs.replace(facts, fields=tuple(fields)), limits)
    start = align64(PRELUDE_BYTES + len(head))
    digest = hashlib.sha256(head).digest()
    prelude = PRELUDE.pack(MAGIC, MAJOR, MINOR, len(head), start + end, digest, 0)
    whole = hashlib.sha256()

    def emit(data: bytes) -> None:
        whole.update(data)
        file.write(data)

    emit(prelude + head + bytes(start - PRELUDE_BYTES - len(head)))
    spool.seek(0)
    while piece := spool.read(_PIECE):
        emit(piece)
    return Written(
        actual_bytes=start + end,
        sha256=whole.hexdigest(),
        body_sha256=body.hexdigest(),
        header_sha256=digest.hex(),
        field_sha256=field_digests(placed),
        completion_counts=tuple(choice.token_count - choice.prompt_token_count for choice in facts.choices),
        header_bytes=len(head),
        raw_bytes=facts.limits.decoded_bytes,
    )


def field_digests(header: wire.Header) -> tuple[tuple[str, str], ...]:
    """Per name, SHA-256 over the digests of its arrays in table order: what a receipt carries."""
    found: dict[str, Any] = {}
    for field in header.fields:
        for array in field.arrays.values():
            found.setdefault(field.name, hashlib.sha256()).update(array.sha256)
    return tuple((name, digest.hexdigest()) for name, digest in found.items())


def _store(
    array: wire.Array,
    rows: ArrayRows,
    codec: wire.Codec,
    spool: Any,
    start: int,
    update: Callable[[Any], None],
    check: EntryCheck,
) -> wire.Array:
    """Write the chunks of one array; each begins at a multiple of 64."""
    name = rows.where.rpartition(".")[2]
    count = chunk_count(array.shape, array.cut)
    if codec == "zstd" and not count:
        codec = "none"  # no elements, no frame
    whole, end, chunks = hashlib.sha256(), start, []
    for number in range(count):
        box = chunk_box(array.shape, array.cut, number)
        values = rows.take(box)
        if values.shape != box_shape(array.shape, box):
            raise malformed(f"{rows.where} has pieces of different shapes")
        check.chunk(name, values, box)
        raw = values.reshape(-1).view("u1").data
        update(raw)
        stored = raw if codec == "none" else _compress(raw)
        padded = _pad(spool, end)
        whole.update(bytes(padded - end))
        whole.update(stored)
        spool.write(stored)
        chunks.append((len(stored), hashlib.sha256(stored).digest()))
        end = padded + len(stored)
    return msgspec.structs.replace(
        array,
        codec=codec,
        offset=start,
        stored_bytes=end - start,
        sha256=whole.digest(),
        chunks=tuple(chunks) if count > 1 else (),
    )


def _compress(raw: memoryview) -> bytes:
    made = zstandard.ZstdCompressor(level=1, write_content_size=True, write_checksum=False, write_dict_id=False)
    return made.compress(raw)


def _pad(spool: Any, end: int) -> int:
    padded = align64(end)
    if padded > end:
        spool.write(bytes(padded - end))
    return padded


def _placed(header: wire.Header, limits: Limits) -> tuple[bytes, wire.Header]:
    """The header with absolute offsets: its own length moves them, so the smallest place that fits is searched for."""
    start = align64(PRELUDE_BYTES + 1)
    while True:
        fields = tuple(
            msgspec.structs.replace(
                field,
                arrays={
                    name: msgspec.structs.replace(array, offset=(array.offset or 0) + start)
                    for name, array in field.arrays.items()
                },
            )
            for field in header.fields
        )
        placed = msgspec.structs.replace(header, fields=fields)
        head = wire.pack(placed)
        if len(head) > limits.header_bytes:
            raise too_large(f"the header takes {len(head)} bytes; at most {limits.header_bytes} are allowed")
        needed = align64(PRELUDE_BYTES + len(head))
        if needed <= start:
            return head, placed
        start = needed
