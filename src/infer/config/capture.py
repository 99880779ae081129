"""What is captured per token beside the output: what the operator asks, and the facts of each captured field.

Plain data: the section is parsed once; profiles are made by the worker's builder from the model and the field plugins.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from pathlib import Path
from typing import Annotated

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from infer.config.units import parse_bytes
from infer.errors import ConfigError

MOE_ROUTES = "moe_routes"
HIDDEN_STATES = "hidden_states"
LAYERED = {
    MOE_ROUTES: ("uint8", "uint16", "int32"),
    HIDDEN_STATES: ("float16", "bfloat16", "float32"),
    "indexer_topk": ("int32",),
}
"""Captured fields that artifacts know, with the dtypes they have there: rows of [layers, width]. Every other name is a
plugin's own, also where an artifact has a field of that name that is not captured."""
FIELD_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}\.[a-z][a-z0-9_-]{0,63}|[a-z][a-z0-9_]{0,63}")
"""What a field of an artifact may be called: well known, or a plugin's, `distribution.name`."""
TAP_ITEM_SIZE = 4
"""Bytes of a tapped integer at most."""
ITEM_SIZES = {"uint8": 1, "uint16": 2, "int32": 4, "float32": 4, "bfloat16": 2, "float16": 2}


def artifact_name(name: str, distribution: str) -> str:
    """What artifacts call the field `name` of a distribution. A name with a dot stays as it is."""
    if name in LAYERED or "." in name:
        return name
    return f"{re.sub('[^a-z0-9_-]', '-', distribution.lower())}.{name}"


def _listed(value: object) -> object:
    """Flags and the environment write lists as "a,b"."""
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


class CaptureSection(BaseModel):
    """Nothing is allocated, copied or sent unless a field is on; and then only for the requests that ask for it."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    routed_experts: bool = False
    """Requests may ask for the experts that every token used (artifact field moe_routes)."""
    hidden_layers: Annotated[tuple[int, ...], BeforeValidator(_listed)] = ()
    """Decoder layers whose output requests may ask for (artifact field hidden_states)."""
    fields: Annotated[tuple[str, ...], BeforeValidator(_listed)] = ()
    """Further artifact fields, of plugins, that requests may ask for."""
    max_bytes: Annotated[int, Field(ge=1), BeforeValidator(parse_bytes)] | None = None
    """Most bytes of rows kept for reuse with the prefix cache, per field. None: rows for every KV block. More than that is
    of use with store_dir alone."""
    shared_memory: bool = False
    """Keep these rows in anonymous shared memory instead of private memory."""
    store_dir: Annotated[str, Field(min_length=1)] | None = None
    """Keep these rows as files below this directory instead, where other processes of this user read them by key: requests
    may then ask for `captured_as="keys"`."""

    def names(self) -> tuple[str, ...]:
        """Artifact fields that are on, each once."""
        built_in = [MOE_ROUTES] * self.routed_experts + [HIDDEN_STATES] * bool(self.hidden_layers)
        return tuple(dict.fromkeys((*built_in, *self.fields)))

    def setting(self, name: str) -> str:
        """The setting that turns a field on."""
        if name in self.fields:
            return "capture.fields"
        return "capture.routed_experts" if name == MOE_ROUTES else "capture.hidden_layers"


class CaptureProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One captured field of one model: what a row is. Two engines with equal digests mean the same rows."""

    name: str
    dtype: str
    """Key of `ITEM_SIZES`; fixed by the model, never by the values."""
    row_shape: tuple[int, ...]
    """For moe_routes (routers, experts per token)."""
    layer_ids: tuple[int, ...] = ()
    """0-based decoder layers of the first axis."""
    num_experts: int = 0
    """Of every router; 0 for other fields."""
    model_identity: str = ""

    @property
    def row_bytes(self) -> int:
        return math.prod(self.row_shape) * ITEM_SIZES[self.dtype]

    @property
    def digest(self) -> bytes:
        """SHA-256 over all of it: part of every key in the store."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).digest()


OBJECT_SUFFIX = ".rows"
"""Of the file of an object."""


def object_key(prefix: bytes, version: int, kv_hash: bytes) -> bytes:
    """Of the rows of one KV block of one field. `prefix` is the engine's run, if any, and the profile's digest."""
    return prefix + version.to_bytes(8, "big") + kv_hash


def object_path(store_dir: str | os.PathLike[str], digest: bytes, key: bytes) -> Path:
    """Where a store in files has it; each profile has its own directory."""
    return Path(store_dir) / digest.hex() / (key.hex() + OBJECT_SUFFIX)


class ResolvedCapture(msgspec.Struct, frozen=True, kw_only=True):
    """Decided at start. Sizes count one field."""

    profiles: tuple[CaptureProfile, ...]
    block_size: int
    """Tokens of one object: a block of the KV hash chain."""
    num_objects: dict[str, int]
    """Field -> objects its store may hold (a hard cap)."""
    max_step_tokens: int
    num_snapshots: int = 1
    """Steps whose rows may be on their way at the same time."""
    queue_size: int
    """Batches of objects that may wait for publication."""
    shared_memory: bool = False
    store_dir: str | None = None
    run: bytes = b""
    """Random, in front of every key that leaves the process: weight versions are counted by each engine from 0."""

    def profile(self, name: str) -> CaptureProfile | None:
        return next((profile for profile in self.profiles if profile.name == name), None)

    def store_bytes(self) -> int:
        return sum(self.num_objects[p.name] * self.block_size * p.row_bytes for p in self.profiles)


def step_bytes(profiles: tuple[CaptureProfile, ...], max_step_tokens: int, num_snapshots: int) -> int:
    """Taps, whose integers are wider than what is kept, and the snapshots of the steps in flight."""
    taps = sum(math.prod(p.row_shape) * max(ITEM_SIZES[p.dtype], TAP_ITEM_SIZE) for p in profiles)
    return max_step_tokens * (taps + num_snapshots * sum(p.row_bytes for p in profiles))


def object_limits(
    section: CaptureSection, profiles: tuple[CaptureProfile, ...], block_size: int
) -> dict[str, int | None]:
    """Field -> most objects that `capture.max_bytes` allows; None: as many as KV blocks. Raises `ConfigError` when not
    even one fits."""
    if section.max_bytes is None:
        return {profile.name: None for profile in profiles}
    for profile in profiles:
        size = block_size * profile.row_bytes
        if section.max_bytes < size:
            raise ConfigError(
                f"capture.max_bytes={section.max_bytes} is less than the {size} bytes that one block of {block_size} rows of "
                f"{profile.name} takes; raise it to {size} or more, or lower cache.block_size",
                fields=("capture.max_bytes", "cache.block_size"),
            )
    return {p.name: section.max_bytes // (block_size * p.row_bytes) for p in profiles}
