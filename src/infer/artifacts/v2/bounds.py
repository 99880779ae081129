"""Most bytes that an artifact can take, known before any inference. Pure arithmetic, no numpy: admission uses it.

`field_bound` describes one well-known field, `bound_v2` adds them up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from infer.artifacts.record import Attribute, Provenance
from infer.artifacts.v1.limits import MAX_ID, align64
from infer.artifacts.v2 import header as wire
from infer.artifacts.v2.fields import RULES, route_dtype
from infer.artifacts.v2.limits import ALIGNMENT, CHUNK_BYTES, ITEM_BYTES, PRELUDE_BYTES, most_chunks
from infer.errors import ArtifactRefusedError

_CHUNK_ENTRY = 48
"""Header bytes of a chunk: its size and digest."""
_FRAME = 128
"""Bytes that a frame and the padding in front of it may add, beside one for each 256."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayBound:
    """One array: its type and what a row is. `per_row` > 1: a row has up to so many entries (a ragged field's values)."""

    dtype: str
    row_shape: tuple[int, ...] = ()
    per_row: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldBound:
    """What is known of a field before it runs. A plugin's field is described by making one."""

    name: str
    arrays: Mapping[str, ArrayBound]
    on_prompt: bool = True
    on_output: bool = True
    rows: int | None = None
    """Rows that are not tokens (steps), or 1 for a field of the request; then it is on the output alone."""
    attributes: Mapping[str, Attribute] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BoundV2:
    """Worst case of all choices together."""

    header_bytes: int
    raw_bytes: int
    """Captured rows: what is held in memory."""
    object_bytes: int


def field_bound(
    name: str,
    *,
    layer_ids: Sequence[int] = (),
    expert_counts: Sequence[int] = (),
    width: int = 0,
    dtype: str = "bf16",
    most: int = 0,
    versions: int = 16,
    with_status: bool = True,
) -> FieldBound:
    """Of a well-known field. `width`: experts per token, indices per layer, or hidden size. `dtype`: of hidden states.
    `most`: tokens of a kept set, or alternatives of topk_logprobs and prompt_logprobs. `versions`: weight versions that a
    request may see, of up to 64 bytes each. Raises `ArtifactRefusedError` for an unknown name."""
    rule = RULES.get(name)
    if rule is None:
        raise ArtifactRefusedError(f"{name[:64]!r} is not one of {', '.join(RULES)}", code="artifact_unsupported")
    row: tuple[int, ...] = ()
    if rule.rank == 3:
        row = (len(layer_ids), width)
    elif rule.rank == 2:
        row = (most + (1 if name == "prompt_logprobs" else 0),)
    kind = rule.dtypes[0]
    if name == "moe_routes":
        kind = route_dtype(max(expert_counts))
    elif name == "hidden_states":
        kind = dtype
    arrays = {"values": ArrayBound(dtype=kind, row_shape=row, per_row=most if rule.ragged else 1)}
    arrays |= {extra: ArrayBound(dtype=type_, row_shape=row) for extra, type_ in rule.extra.items()}
    if rule.ragged:
        arrays["offsets"] = ArrayBound(dtype="i64")
    if with_status:
        arrays["status"] = ArrayBound(dtype="u8")
    values: dict[str, Attribute] = {
        "layer_ids": tuple(layer_ids),
        "expert_counts": tuple(expert_counts),
        "versions": ("v" * 64,) * versions,
    }
    return FieldBound(
        name=name,
        arrays=arrays,
        on_prompt=rule.part != "output",
        on_output=rule.part != "prompt",
        attributes={key: values[key] for key in rule.attributes},
    )


def bound_v2(
    fields: Sequence[FieldBound],
    *,
    prompt_tokens: int,
    max_tokens: int,
    num_choices: int = 1,
    shared_prompt: bool = True,
    provenance: Provenance | None = None,
    longest_stop: int = 0,
    chunk_bytes: int = CHUNK_BYTES,
) -> BoundV2:
    """Either codec. `fields` without token_ids, which are always there.

    `shared_prompt`: the rows of the prompt are captured once for all choices; False allows for each choice having its own
    (recomputed after preemption, say). `longest_stop`: bytes of the longest stop string.
    """
    named = [bound for bound in fields if bound.name != "token_ids"]
    named.append(field_bound("token_ids", with_status=False))
    header = PRELUDE_BYTES + _frame_of_header(named, prompt_tokens, max_tokens, num_choices, provenance, longest_stop)
    raw = stored = 0
    for bound in named:
        copies = 1 if shared_prompt else num_choices
        parts = [(prompt_tokens, copies)] if bound.on_prompt and bound.rows is None else []
        if bound.rows is not None or bound.on_output or not parts:
            parts.append((max_tokens if bound.rows is None else bound.rows, num_choices))
        for rows, times in parts:
            entry, size, chunks = _entry(bound, rows, chunk_bytes, prompt_tokens + max_tokens)
            header += times * entry
            raw += times * size
            stored += times * (size + (size >> 8) + (chunks + len(bound.arrays)) * _FRAME)
        if len(parts) == 2 or copies == 1:
            header += num_choices * 9  # the choices that share an entry
    return BoundV2(header_bytes=header - PRELUDE_BYTES, raw_bytes=raw, object_bytes=align64(header) + stored)


def _entry(bound: FieldBound, rows: int, chunk_bytes: int, highest: int) -> tuple[int, int, int]:
    """Header bytes, raw bytes and chunks of one entry with so many rows."""
    arrays, raw, chunks, listed = {}, 0, 0, 0
    for name, array in bound.arrays.items():
        first = rows * array.per_row + (1 if name == "offsets" else 0)
        shape = (first, *array.row_shape)
        item = ITEM_BYTES[array.dtype]
        size, count = prod(shape) * item, most_chunks(shape, item, chunk_bytes)
        raw, chunks, listed = raw + size, chunks + count, listed + (count if count > 1 else 0)
        arrays[name] = wire.Array(
            dtype=array.dtype,
            shape=shape,
            raw_bytes=size,
            chunk_shape=shape,
            codec="zstd",
            offset=MAX_ID,
            stored_bytes=MAX_ID,
            sha256=bytes(32),
            chunks=((0, b""),),
        )
    field = wire.Field(
        name=bound.name,
        scope="prompt_token",
        choices=(MAX_ID,),
        row_start=highest,
        arrays=arrays,
        executed=True,
        attributes=dict(bound.attributes),
    )
    return wire.size_of(field) + 8 * len(arrays) + listed * _CHUNK_ENTRY, raw, chunks


def _frame_of_header(
    fields: Sequence[FieldBound],
    prompt_tokens: int,
    max_tokens: int,
    num_choices: int,
    provenance: Provenance | None,
    longest_stop: int,
) -> int:
    """All of the header but the field table."""
    choice = wire.Choice(
        choice_index=MAX_ID,
        prompt_token_count=prompt_tokens,
        token_count=prompt_tokens + max_tokens,
        finish_reason="repetition",
        seed=MAX_ID,
        stop_reason="s" * max(longest_stop, 16),
    )
    parent = 256 + sum(len(bound.name) + 4 for bound in fields)
    totals = 128
    return num_choices * wire.size_of(choice) + parent + totals + wire.size_of(provenance or Provenance()) + ALIGNMENT
