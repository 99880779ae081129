"""The header of `generation_artifact_v2`: canonical MessagePack with a closed schema. Pure; owns nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec

from infer.artifacts.record import Attribute, ParentReference, Provenance
from infer.errors import ArtifactCorruptError
from infer.types import FinishReason

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Codec = Literal["none", "zstd"]
Scope = Literal["prompt_token", "output_token", "step", "request"]
SCOPES: tuple[Scope, ...] = ("prompt_token", "output_token", "step", "request")
STORAGE_KEYS = ("chunks", "codec", "offset", "sha256", "stored_bytes")
"""Keys of an array that say how it is stored, not what it is."""


class Array(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One array and its place. `chunk_shape` and `chunks` are there when it has more than one chunk."""

    dtype: str
    shape: tuple[Count, ...]
    raw_bytes: Count
    chunk_shape: tuple[Count, ...] = ()
    codec: Codec | None = None
    offset: Count | None = None
    stored_bytes: Count | None = None
    sha256: bytes = b""
    chunks: tuple[tuple[Count, bytes], ...] = ()
    """Stored bytes and SHA-256 of each."""

    @property
    def cut(self) -> tuple[int, ...]:
        """Shape of a chunk, also when there is one."""
        return self.chunk_shape or self.shape


class Field(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An entry of the field table: rows of one field within one scope, for the choices that share them."""

    name: str
    scope: Scope
    choices: tuple[Count, ...]
    row_start: Count
    arrays: dict[str, Array]
    executed: bool = False
    attributes: dict[str, Attribute] = msgspec.field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        offsets = self.arrays.get("offsets")
        return self.arrays["values"].shape[0] if offsets is None else offsets.shape[0] - 1

    @property
    def row_end(self) -> int:
        return self.row_start + self.num_rows


class Choice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Both counts are those of the whole sequence, also when a parent holds its beginning."""

    choice_index: Count
    prompt_token_count: Count
    token_count: Count
    finish_reason: FinishReason | None = None
    seed: Count | None = None
    stop_reason: int | str | None = None


class Totals(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What reading the whole object takes; exact."""

    chunk_bytes: Count
    """Of the largest decoded chunk."""
    chunks: Count
    decoded_bytes: Count
    fields: Count


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    choices: tuple[Choice, ...]
    fields: tuple[Field, ...]
    limits: Totals
    provenance: Provenance = Provenance()
    parent: ParentReference | None = None


def pack(header: Header) -> bytes:
    """Canonical bytes."""
    return msgspec.msgpack.encode(_plain(header), order="deterministic")


def pack_facts(header: Header) -> bytes:
    """The header without all that depends on codec and compression library: how the digest of the content begins."""
    plain = _plain(header)
    del plain["limits"]
    for field in plain["fields"]:
        for array in field["arrays"].values():
            for key in STORAGE_KEYS:
                array.pop(key, None)
    return msgspec.msgpack.encode(plain, order="deterministic")


def size_of(part: msgspec.Struct) -> int:
    """Bytes that a part takes in a header."""
    return len(msgspec.msgpack.encode(msgspec.to_builtins(part, builtin_types=(bytes,))))


def unpack(data: bytes) -> Header:
    """Raises `ArtifactCorruptError` unless the schema holds and the bytes are the only ones that say the same."""
    try:
        header = msgspec.msgpack.decode(data, type=Header)
        canonical = pack(header) == data
    except msgspec.ValidationError as error:
        raise ArtifactCorruptError(f"the header is against the schema: {str(error)[:200]}") from None
    except (msgspec.MsgspecError, RecursionError, TypeError, ValueError, OverflowError) as error:
        raise ArtifactCorruptError(f"the header is not MessagePack: {type(error).__name__}") from None
    if not canonical:
        raise ArtifactCorruptError(
            "the header is not canonical (order of keys, width of a number, a default written out)"
        )
    if not finite(header):
        raise ArtifactCorruptError("the header holds a number that is not finite")
    return header


def finite(header: Header) -> bool:
    """Every float of attributes and sampling parameters is a number."""
    found: list[Any] = [value for field in header.fields for value in field.attributes.values()]
    for value in header.provenance.sampling.values():
        inner: Iterable[Any] = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else ()
        found += [value, *inner]
    return all(math.isfinite(value) for value in found if isinstance(value, float))


def _plain(header: Header) -> Any:
    plain = msgspec.to_builtins(header, builtin_types=(bytes,))
    provenance = plain.get("provenance", {})
    if not provenance.get("numerics", True):
        del provenance["numerics"]
    if not provenance:  # nothing is said in one way only
        plain.pop("provenance", None)
    return plain
