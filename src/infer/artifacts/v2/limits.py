"""Wire constants, limits and chunk arithmetic of `generation_artifact_v2`. Pure integers, no numpy: admission uses them too."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

FORMAT = "generation_artifact_v2"
MAGIC = b"INFGEN2\0"
MAJOR, MINOR = 2, 0
PRELUDE = struct.Struct("<8sHHIQ32sQ")
"""Magic, major, minor, header bytes, object bytes, SHA-256 of the header, zero."""
PRELUDE_BYTES = 64
ALIGNMENT = 64
ITEM_BYTES = {
    "u8": 1,
    "i8": 1,
    "u16": 2,
    "i16": 2,
    "f16": 2,
    "bf16": 2,
    "u32": 4,
    "i32": 4,
    "f32": 4,
    "u64": 8,
    "i64": 8,
    "f64": 8,
}
MAX_RANK = 8
MAX_ARRAYS = 16
"""Arrays of one entry of the field table."""
MAX_EXTENT_BYTES = 2**48
"""Of a shape whose zeros count as one, so that a zero hides nothing."""
CHUNK_BYTES = 2**18
"""What the writer aims at for a decoded chunk."""
CHUNK_ROWS = 1024
"""Rows that a chunk should have before all layers are put into one."""
MAX_ARRAY_CHUNKS = 4096
"""Beyond this the writer makes larger chunks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a reader accepts and a writer keeps to. A header declares its own needs, and they are compared first."""

    header_bytes: int = 2**22
    fields: int = 2**14
    """Entries of the field table."""
    chunks: int = 2**16
    chunk_bytes: int = 2**24
    """Decoded bytes of one chunk."""
    decoded_bytes: int = 2**34
    """Of all chunks together."""


DEFAULT_LIMITS = Limits()


def chunk_shape(shape: Sequence[int], item_bytes: int, target: int) -> tuple[int, ...]:
    """How the writer cuts an array: along rows, and along the second axis (layers) when there is a third one."""
    while True:
        chunk = _chunk_shape(shape, item_bytes, target)
        if chunk_count(shape, chunk) <= MAX_ARRAY_CHUNKS:
            return chunk
        target *= 2


def most_chunks(shape: Sequence[int], item_bytes: int, target: int) -> int:
    """Of an array with at most these rows."""
    return min(MAX_ARRAY_CHUNKS, chunk_count(shape, _chunk_shape(shape, item_bytes, target)))


def _chunk_shape(shape: Sequence[int], item_bytes: int, target: int) -> tuple[int, ...]:
    if prod(shape) * item_bytes <= target:
        return tuple(shape)
    width = shape[1] if len(shape) > 1 else 1
    column = prod(shape[2:]) * item_bytes
    if len(shape) > 2:
        groups = -(-width // max(1, min(width, target // (CHUNK_ROWS * column))))
        width = -(-width // groups)
    rows = min(shape[0], max(1, target // (width * column)))
    return (rows, width, *shape[2:]) if len(shape) > 1 else (rows,)


def chunk_count(shape: Sequence[int], chunk: Sequence[int]) -> int:
    """Cells of the grid; an array without elements has none."""
    return prod(-(-extent // part) for extent, part in zip(shape, chunk, strict=True)) if prod(shape) else 0


def chunk_box(shape: Sequence[int], chunk: Sequence[int], number: int) -> tuple[int, int, int, int]:
    """First and end row, first and end column of a cell; cells are numbered row by row."""
    if len(shape) == 1:
        first = number * chunk[0]
        return first, min(first + chunk[0], shape[0]), 0, 1
    across = -(-shape[1] // chunk[1])
    first, left = number // across * chunk[0], number % across * chunk[1]
    return first, min(first + chunk[0], shape[0]), left, min(left + chunk[1], shape[1])


def box_shape(shape: Sequence[int], box: tuple[int, int, int, int]) -> tuple[int, ...]:
    """Shape of one cell."""
    if len(shape) == 1:
        return (box[1] - box[0],)
    return (box[1] - box[0], box[3] - box[2], *shape[2:])
