"""Rows of a field out of its entries: read, joined, cut to layers, joined with those of a parent. Pure but for the source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer.artifacts.byte_source import ByteSource
from infer.artifacts.record import CAPTURED, Attribute, FieldRows
from infer.artifacts.v2.header import Field
from infer.artifacts.v2.ranges import Selection, fetch
from infer.errors import ArtifactCorruptError, ArtifactFieldMissingError


def read_rows(
    source: ByteSource,
    entries: Sequence[Field],
    ranges: Sequence[tuple[int, int]],
    columns: tuple[int, ...] | None,
    start: int,
) -> FieldRows:
    """These rows of each entry, one behind the other; the first is row `start`. Two requests for a ragged field in one
    piece, one for any other."""
    first, offsets = entries[0], None
    pairs = [(entry, (low, max(low, high))) for entry, (low, high) in zip(entries, ranges, strict=True)]
    inner = pairs
    if "offsets" in first.arrays:
        chosen = [
            Selection(entry.arrays["offsets"], low, high + 1 if high > low else low) for entry, (low, high) in pairs
        ]
        parts = fetch(source, chosen)
        inner = [(entry, _inner(entry, part)) for (entry, _), part in zip(pairs, parts, strict=True)]
        offsets = _rebased(parts)
    names = sorted(set(first.arrays) - {"offsets", "status"})
    selections = [Selection(entry.arrays[name], *part, columns) for name in names for entry, part in inner]
    flagged = any("status" in entry.arrays for entry, _ in pairs)
    if flagged:
        selections += [Selection(entry.arrays["status"], *part) for entry, part in pairs if "status" in entry.arrays]
    read = iter(fetch(source, selections))
    arrays = {name: _one([next(read) for _ in inner]) for name in names}
    status = _one([_status(entry, part, read) for entry, part in pairs]) if flagged else None
    return FieldRows(
        values=arrays.pop("values"),
        row_start=start,
        extra=arrays,
        offsets=offsets,
        status=status,
        attributes=dict(first.attributes) if columns is None else _picked(first, columns),
        axis="token" if first.scope.endswith("token") else "step" if first.scope == "step" else "request",
        executed=first.executed,
        bfloat16=first.arrays["values"].dtype == "bf16",
    )


def columns_of(field: Field, layers: tuple[int, ...]) -> tuple[int, ...]:
    """Places of decoder layers on the second axis. Raises `ArtifactFieldMissingError`."""
    known = field.attributes.get("layer_ids")
    if not isinstance(known, tuple) or any(len(a.shape) < 2 for name, a in field.arrays.items() if name == "values"):
        raise ArtifactFieldMissingError(f"{field.name} has no layers")
    absent = [layer for layer in layers if layer not in known]
    if absent:
        shown = ", ".join(map(str, known[:64]))
        raise ArtifactFieldMissingError(f"layer {absent[0]} has no {field.name} here; those that have are {shown}")
    return tuple(known.index(layer) for layer in layers)


def joined(before: FieldRows, after: FieldRows) -> FieldRows:
    """The parent's rows and the child's. Raises `ArtifactCorruptError` when they are not of one kind."""
    if not after.num_rows:
        return before
    same = ("attributes", "axis", "executed", "bfloat16")
    if any(getattr(before, name) != getattr(after, name) for name in same) or set(before.extra) != set(after.extra):
        raise ArtifactCorruptError("the rows of parent and child differ in their attributes")
    shapes = [(rows.values.dtype, rows.values.shape[1:], rows.offsets is None) for rows in (before, after)]
    if shapes[0] != shapes[1]:
        raise ArtifactCorruptError("the rows of parent and child differ in type or shape")
    status = offsets = None
    if before.status is not None or after.status is not None:
        none = [np.full(rows.num_rows, CAPTURED, np.uint8) for rows in (before, after)]
        given = [
            rows.status if rows.status is not None else other for rows, other in zip((before, after), none, strict=True)
        ]
        status = _one(given)
    if before.offsets is not None and after.offsets is not None:
        offsets = _rebased([before.offsets, after.offsets])
    return replace(
        before,
        values=_one([before.values, after.values]),
        extra={name: _one([array, after.extra[name]]) for name, array in before.extra.items()},
        status=status,
        offsets=offsets,
    )


def _inner(entry: Field, offsets: NDArray[Any]) -> tuple[int, int]:
    """Range of the values of a piece of a ragged field."""
    if not len(offsets):
        return 0, 0
    low, high = int(offsets[0]), int(offsets[-1])
    if low < 0 or high > entry.arrays["values"].shape[0] or bool((np.diff(offsets) < 0).any()):
        raise ArtifactCorruptError(f"{entry.name}: offsets decrease or leave the values")
    return low, high


def _rebased(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Offsets of the joined rows, from 0."""
    pieces, base = [np.zeros(1, np.int64)], 0
    for part in parts:
        if len(part):
            pieces.append(part[1:] - part[0] + base)
            base += int(part[-1] - part[0])
    return _one([np.concatenate(pieces)])


def _status(entry: Field, part: tuple[int, int], read: Any) -> NDArray[Any]:
    if "status" in entry.arrays:
        found: NDArray[Any] = next(read)
        return found
    return np.full(part[1] - part[0], CAPTURED, np.uint8)


def _picked(field: Field, columns: tuple[int, ...]) -> dict[str, Attribute]:
    """Attributes that have an entry for each layer, for these layers only."""
    width = field.arrays["values"].shape[1]
    return {
        name: tuple(value[column] for column in columns) if isinstance(value, tuple) and len(value) == width else value
        for name, value in field.attributes.items()
    }


def _one(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    filled = [part for part in parts if len(part)] or [parts[0]]
    array = filled[0] if len(filled) == 1 else np.concatenate(filled)
    array.flags.writeable = False
    return array
