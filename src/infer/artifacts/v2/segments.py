"""From a record to the entries of the field table: cut at the end of the prompt, trimmed to the parent, prompt rows shared.

Pure; works on views of the captured arrays and copies nothing but the version numbers of weight spans.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from infer.artifacts.record import Attribute, ChoiceRecord, FieldRows, GenerationRecord, WeightSpan
from infer.artifacts.v1.encoder import integer_array
from infer.artifacts.v1.semantics import integer, malformed
from infer.artifacts.v2.fields import RULES, route_dtype
from infer.artifacts.v2.header import SCOPES, Array, Choice, Field
from infer.artifacts.v2.limits import CHUNK_BYTES, ITEM_BYTES
from infer.artifacts.v2.values import dtype_name, narrow

_MANY = 2**62


@dataclass(frozen=True, slots=True, eq=False)
class ArrayRows:
    """An array that is still in the pieces in which it was captured; each piece has a number to add to its values."""

    where: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[NDArray[Any], int], ...]
    starts: tuple[int, ...]
    """First row of each piece."""

    def take(self, box: tuple[int, int, int, int]) -> NDArray[Any]:
        """Rows and columns of a box, in the wire's type. Raises `ArtifactError` when a value does not fit."""
        first, end, left, right = box
        parts = []
        low, high = bisect_right(self.starts, first) - 1, bisect_left(self.starts, end)
        for (rows, added), start in zip(self.pieces[low:high], self.starts[low:high], strict=True):
            part = rows[max(0, first - start) : end - start]
            part = part[:, left:right] if part.ndim > 1 else part
            if len(part):
                parts.append(narrow(part + added if added else part, self.dtype, self.where))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def equals(self, other: ArrayRows) -> bool:
        """Same bytes on the wire."""
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return False
        if [_place(rows, added) for rows, added in self.pieces] == [
            _place(rows, added) for rows, added in other.pieces
        ]:
            return True
        width = self.shape[1] if len(self.shape) > 1 else 1
        step = max(1, CHUNK_BYTES // max(1, int(np.prod(self.shape[1:])) * ITEM_BYTES[self.dtype]))
        return all(
            self.take(box).tobytes() == other.take(box).tobytes()
            for first in range(0, self.shape[0], step)
            for box in [(first, min(first + step, self.shape[0]), 0, width)]
        )

    def described(self) -> Array:
        return Array(dtype=self.dtype, shape=self.shape, raw_bytes=int(np.prod(self.shape)) * ITEM_BYTES[self.dtype])


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """One entry of the field table before it is stored."""

    field: Field
    arrays: dict[str, ArrayRows]

    def equals(self, other: Segment) -> bool:
        mine, theirs = (msgspec.structs.replace(one.field, choices=()) for one in (self, other))
        return mine == theirs and all(rows.equals(other.arrays[name]) for name, rows in self.arrays.items())


def described_choice(choice: ChoiceRecord) -> Choice:
    """Raises `ArtifactError` for a number that is none."""
    prompt, output = len(choice.prompt_token_ids), len(choice.output_token_ids)
    return Choice(
        choice_index=integer(choice.choice_index, "choice_index"),
        prompt_token_count=prompt,
        token_count=prompt + output,
        finish_reason=choice.finish_reason,
        seed=None if choice.seed is None else integer(choice.seed, "seed"),
        stop_reason=choice.stop_reason,
    )


def plan(record: GenerationRecord) -> list[Segment]:
    """All entries in the order in which they are written. Raises `ArtifactError` when pieces do not fit together."""
    versions = tuple(dict.fromkeys(span.version for choice in record.choices for span in choice.weight_spans))
    found: dict[tuple[str, int], list[Segment]] = {}
    for choice in record.choices:
        for name, pieces in _fields(choice, versions).items():
            for segment in _segments(name, pieces, choice, record):
                _share(segment, found.setdefault((name, SCOPES.index(segment.field.scope)), []))
    made = [segment for segments in found.values() for segment in segments]
    return sorted(made, key=lambda one: (one.field.name, SCOPES.index(one.field.scope), one.field.choices))


def _share(segment: Segment, known: list[Segment]) -> None:
    """Prompt rows that are equal belong to one entry."""
    if segment.field.scope == "prompt_token":
        for place, other in enumerate(known):
            if segment.equals(other):
                choices = other.field.choices + segment.field.choices
                known[place] = Segment(msgspec.structs.replace(other.field, choices=choices), other.arrays)
                return
    known.append(segment)


def _fields(choice: ChoiceRecord, versions: tuple[str, ...]) -> dict[str, list[FieldRows]]:
    for name in ("token_ids", "weight_spans"):
        if name in choice.fields:
            raise malformed(f"{name} is no field of a choice record; it has a place of its own")
    made = {name: [given] if isinstance(given, FieldRows) else list(given) for name, given in choice.fields.items()}
    prompt = integer_array(choice.prompt_token_ids, "prompt_token_ids", 1, _MANY)
    output = integer_array(choice.output_token_ids, "output_token_ids", 1, _MANY)
    made["token_ids"] = [FieldRows(values=prompt), FieldRows(values=output, row_start=len(prompt))]
    if choice.weight_spans:
        made["weight_spans"] = [_version_rows(choice.weight_spans, versions, len(prompt) + len(output))]
    return made


def _version_rows(spans: Sequence[WeightSpan], versions: tuple[str, ...], num_tokens: int) -> FieldRows:
    start = spans[0].start
    end = start
    for span in spans:
        if span.start != end or span.end <= span.start:
            raise malformed(f"weight span {span.start} to {span.end} follows token {end}; spans cover each token once")
        end = span.end
    if end != num_tokens:
        raise malformed(f"weight spans end at token {end} of {num_tokens}")
    numbers = np.array([versions.index(span.version) for span in spans], np.uint32)
    rows = np.repeat(numbers, [span.end - span.start for span in spans])
    return FieldRows(values=rows, row_start=start, attributes={"versions": versions})


def _segments(name: str, pieces: list[FieldRows], choice: ChoiceRecord, record: GenerationRecord) -> list[Segment]:
    if not pieces:
        raise malformed(f"field {name} of choice {choice.choice_index} has no pieces; leave it out instead")
    pieces = [_checked(name, piece) for piece in pieces]
    for before, after in itertools.pairwise(pieces):
        if after.row_start != before.row_end or _kind(after) != _kind(before):
            raise malformed(
                f"field {name}: rows from {after.row_start} do not continue those that end at {before.row_end}"
            )
    first = pieces[0]
    if first.axis != "token":
        return [_segment(name, pieces, first.axis, choice)]
    executed = _executed(name, first)
    start = first.row_start
    if record.parent is not None and name in record.parent.fields:
        start = max(start, record.parent.token_count - (1 if executed else 0))
    prompt, end = len(choice.prompt_token_ids), pieces[-1].row_end
    rule = RULES.get(name)
    parts = []
    for scope, low, high in (("prompt_token", start, min(end, prompt)), ("output_token", max(start, prompt), end)):
        cut = [_cut(piece, low, high) for piece in pieces if max(piece.row_start, low) < min(piece.row_end, high)]
        if cut:
            parts.append(_segment(name, cut, scope, choice))
    if not parts:  # no rows at all: said once
        in_prompt = start < prompt or (rule is not None and rule.part == "prompt")
        empty = replace(_cut(first, first.row_start, first.row_start), row_start=start)
        parts.append(_segment(name, [empty], "prompt_token" if in_prompt else "output_token", choice))
    return parts


def _executed(name: str, piece: FieldRows) -> bool:
    rule = RULES.get(name)
    if rule is None and "." not in name:
        raise malformed(f"{name[:64]!r} is no field of {', '.join(RULES)}; a plugin's is called distribution.name")
    if rule is None and piece.executed is None:
        raise malformed(f"field {name} must say whether its rows are of fed tokens (executed)")
    return bool(piece.executed) if rule is None else rule.executed


def _kind(piece: FieldRows) -> tuple[Any, ...]:
    """What must be the same in all pieces."""
    arrays = {"values": piece.values, **piece.extra}
    shapes = {name: (array.dtype.str, array.shape[1:]) for name, array in arrays.items()}
    present = (piece.offsets is None, piece.axis, piece.executed, piece.bfloat16)
    return shapes, present, dict(piece.attributes)


def _checked(name: str, piece: FieldRows) -> FieldRows:
    """Arrays are arrays, and as long as they must be."""
    rows = integer(piece.row_start, f"row_start of {name}")
    arrays = {"values": piece.values, **piece.extra}
    special = {"offsets": piece.offsets, "status": piece.status}
    for key, array in (*arrays.items(), *special.items()):
        if array is not None and (not isinstance(array, np.ndarray) or array.ndim < 1):
            raise malformed(f"{name}.{key} must be a numpy array with an axis of rows")
    if {"values", *special} & set(piece.extra):
        raise malformed(f"field {name}: values, offsets and status are no extra arrays")
    offsets = piece.offsets
    if offsets is not None and (offsets.ndim != 1 or not len(offsets) or offsets.dtype.kind not in "iu"):
        raise malformed(f"{name}.offsets must be integers, one more than there are rows")
    if offsets is not None and not 0 <= int(offsets[0]) <= int(offsets[-1]) <= len(piece.values):
        raise malformed(f"{name}.offsets lead from {offsets[0]} to {offsets[-1]} of {len(piece.values)} values")
    attributes = {key: tuple(value) if isinstance(value, list) else value for key, value in piece.attributes.items()}
    offsets = None if offsets is None else offsets.astype(np.int64, copy=False)
    return replace(piece, row_start=rows, offsets=offsets, attributes=attributes)


def _cut(piece: FieldRows, low: int, high: int) -> FieldRows:
    """Rows `low` to `high` as views; offsets keep counting from where they did."""
    first, end = max(low, piece.row_start) - piece.row_start, min(high, piece.row_end) - piece.row_start
    status = None if piece.status is None else piece.status[first:end]
    inner = slice(first, end)
    offsets = piece.offsets
    if offsets is not None:
        offsets = offsets[first : end + 1]
        inner = slice(int(offsets[0]), int(offsets[-1]))
    return replace(
        piece,
        values=piece.values[inner],
        extra={name: array[inner] for name, array in piece.extra.items()},
        offsets=offsets,
        status=status,
        row_start=piece.row_start + first,
    )


def _segment(name: str, pieces: list[FieldRows], scope: Any, choice: ChoiceRecord) -> Segment:
    first, rule = pieces[0], RULES.get(name)
    rows: dict[str, list[tuple[NDArray[Any], int]]] = {}
    total = 0
    for piece in pieces:
        for key, array in (("values", piece.values), *piece.extra.items()):
            rows.setdefault(key, []).append((array, 0))
        if piece.offsets is not None:
            added = total - int(piece.offsets[0])
            later = len(rows["values"]) > 1  # the last offset of the piece before is the first of this one
            rows.setdefault("offsets", []).append((piece.offsets[1:] if later else piece.offsets, added))
            total += len(piece.values)
    if any(piece.status is not None for piece in pieces):
        rows["status"] = [(_status(name, piece), 0) for piece in pieces]
    arrays = {key: _array(name, key, found, first) for key, found in rows.items()}
    field = Field(
        name=name,
        scope=scope,
        choices=(choice.choice_index,),
        row_start=first.row_start,
        arrays={key: array.described() for key, array in sorted(arrays.items())},
        executed=(_executed(name, first) if first.axis == "token" else bool(first.executed))
        if rule is None
        else rule.executed,
        attributes=_attributes(first.attributes),
    )
    return Segment(field, arrays)


def _status(name: str, piece: FieldRows) -> NDArray[Any]:
    if piece.status is None:
        return np.zeros(piece.num_rows, np.uint8)
    if len(piece.status) != piece.num_rows or piece.status.dtype.kind not in "iu":
        raise malformed(f"{name}.status has {len(piece.status)} entries for {piece.num_rows} rows")
    return piece.status


def _array(name: str, key: str, pieces: list[tuple[NDArray[Any], int]], first: FieldRows) -> ArrayRows:
    array = pieces[0][0]
    rule = RULES.get(name)
    if key in ("offsets", "status"):
        dtype = {"offsets": "i64", "status": "u8"}[key]
    elif key == "values" and name == "moe_routes":
        counts = first.attributes.get("expert_counts")
        if not isinstance(counts, tuple) or not counts or not all(isinstance(count, int) for count in counts):
            raise malformed("moe_routes needs expert_counts, a list of the experts of each layer")
        dtype = route_dtype(max(int(count) for count in counts))
    elif key == "values" and first.bfloat16:
        dtype = "bf16"
    elif rule is None or (key == "values" and len(rule.dtypes) > 1):
        dtype = dtype_name(array.dtype)
    else:
        dtype = rule.dtypes[0] if key == "values" else rule.extra.get(key, dtype_name(array.dtype))
    kinds = "f" if dtype.startswith("f") else "iu"
    if array.dtype.kind not in kinds and not (dtype == "u8" and array.dtype.kind == "b"):
        raise malformed(f"{name}.{key} has dtype {array.dtype}; it must be {dtype}, or convertible without loss")
    starts = list(itertools.accumulate((len(piece) for piece, _ in pieces), initial=0))
    return ArrayRows(f"{name}.{key}", dtype, (starts[-1], *array.shape[1:]), tuple(pieces), tuple(starts[:-1]))


def _attributes(given: Any) -> dict[str, Attribute]:
    return dict(sorted(given.items()))


def _place(rows: NDArray[Any], added: int) -> tuple[Any, ...]:
    interface = rows.__array_interface__
    return interface["data"][0], rows.shape, rows.strides, rows.dtype.str, added
