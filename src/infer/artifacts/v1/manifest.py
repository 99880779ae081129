"""The manifest of `generation_artifact_v1`: canonical MessagePack with a closed schema. Pure; owns nothing."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from infer.artifacts.v1.limits import MAX_ID
from infer.errors import ArtifactCorruptError

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_ID)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=MAX_ID)]


class Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    byte_count: Count
    dtype: str
    offset: Count
    shape: tuple[Count, ...]


class Routes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="moe_routes"):
    expert_counts: tuple[Positive, ...]
    expert_ids: Tensor
    router_ids: tuple[Count, ...]
    token_start: Count


class Logprobs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="selected_logprobs"):
    logprobs: Tensor
    token_start: Count


class Choice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    choice_index: Count
    components: tuple[Routes | Logprobs, ...]
    prompt_token_count: Count
    sequence_token_ids: Tensor


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    choices: Annotated[tuple[Choice, ...], msgspec.Meta(min_length=1)]


def pack(manifest: Manifest) -> bytes:
    """Canonical bytes."""
    return _canonical(msgspec.to_builtins(manifest))


def unpack(data: bytes) -> Manifest:
    """The manifest in `data`. Raises `ArtifactCorruptError` unless the bytes are canonical and the schema holds."""
    try:
        loose: Any = msgspec.msgpack.decode(data)
        canonical = _canonical(loose) == data
    except (msgspec.MsgspecError, RecursionError, TypeError, ValueError, OverflowError) as error:
        raise ArtifactCorruptError(f"the manifest is not MessagePack: {type(error).__name__}") from None
    if not canonical:
        raise ArtifactCorruptError("the manifest is not canonical MessagePack (order of keys or width of a header)")
    try:
        manifest = msgspec.convert(loose, Manifest)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ArtifactCorruptError(f"the manifest is against the schema: {_short(error)}") from None
    previous = -1
    for choice in manifest.choices:
        if choice.choice_index <= previous:
            raise ArtifactCorruptError(f"choice_index {choice.choice_index} follows {previous}; it must increase")
        previous = choice.choice_index
        kinds = [type(component) for component in choice.components]
        if len(set(kinds)) != len(kinds):
            raise ArtifactCorruptError(f"choice {choice.choice_index} has two components of one kind")
    return manifest


def _canonical(value: Any) -> bytes:
    return msgspec.msgpack.encode(value, order="deterministic")


def _short(error: Exception) -> str:
    """Part of the message may be attacker's text of any length."""
    return str(error)[:200]
