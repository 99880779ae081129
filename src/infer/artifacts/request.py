"""What a caller asks for: which contents, in which format, delivered where. Parsed from JSON or made in process.

Knows the shape of a request, not what this engine can capture (that is `admission`) nor whether a target is allowed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from infer.artifacts.v1.limits import FORMAT
from infer.errors import ArtifactRefusedError

REDACTED = "[REDACTED]"
_KEYS = {
    "request": ({"format", "contents", "delivery"}, {"codec", "parent"}),
    "parent": ({"sha256", "header_sha256", "token_count"}, {"choice_index", "fields"}),
    "delivery": ({"mode", "target"}, set[str]()),
    "presigned_http_put": ({"kind", "url", "expires_at", "max_bytes", "object_id"}, {"required_headers"}),
    "managed_fsspec": ({"kind", "profile", "object_key"}, set[str]()),
}
"""Level -> (required keys, optional keys)."""


class Secret:
    """Text that no debug output shows."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        return self._value

    def __repr__(self) -> str:
        return "<redacted>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)


@dataclass(frozen=True, slots=True, init=False)
class PresignedTarget:
    """An upload grant: one PUT to a signed URL."""

    url: Secret
    expires_at: str = field(repr=False)
    """RFC 3339, with an offset."""
    max_bytes: int
    object_id: str
    """Opaque; echoed in the receipt."""
    required_headers: Mapping[str, Secret]

    def __init__(
        self,
        *,
        url: str,
        expires_at: str,
        max_bytes: int,
        object_id: str,
        required_headers: Mapping[str, str] | None = None,
    ) -> None:
        headers = {name: Secret(value) for name, value in (required_headers or {}).items()}
        values = (Secret(url), expires_at, max_bytes, object_id, headers)
        for name, value in zip(self.__dataclass_fields__, values, strict=True):
            object.__setattr__(self, name, value)


@dataclass(frozen=True, slots=True)
class ManagedTarget:
    """A key below a storage profile of the operator's."""

    profile: str
    object_key: str


@dataclass(frozen=True, slots=True)
class SinkTarget:
    """In process only: `sink(data)`, an `async def`, takes the object and returns its id for the receipt."""

    sink: Callable[[bytes], Awaitable[str]] = field(repr=False)
    max_bytes: int = 2**62


Target = PresignedTarget | ManagedTarget | SinkTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactParent:
    """The artifact of the turn before (`ArtifactReceipt.as_parent`): the new one stores only rows that this one lacks."""

    sha256: str
    """Of the whole object, hexadecimal."""
    header_sha256: str
    token_count: int
    """Leading tokens of the prompt that are the parent's."""
    choice_index: int = 0
    """Choice of the parent that is continued."""
    fields: tuple[str, ...] | None = None
    """Fields whose earlier rows the parent has, `token_ids` among them. None: `token_ids` and every one of `contents` that has
    rows of prompt tokens; the parent must have the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactRequest:
    """Ask for a generation artifact. Prompt and completion token ids are always written to the object, also when
    `contents` is empty or names only routes or log-probabilities.
    """

    target: Target
    contents: tuple[str, ...] = ()
    """generation_artifact_v1: of "moe_routes" and "selected_logprobs". generation_artifact_v2: names of fields."""
    format: str = FORMAT
    """Or "generation_artifact_v2"."""
    codec: Literal["zstd"] = "zstd"
    strict: bool = False
    """Raise when the artifact fails, instead of saying so in the receipt."""
    deliver_on_abort: bool = False
    """Deliver the tokens accepted so far when the request is aborted."""
    parent: ArtifactParent | None = None
    """generation_artifact_v2: the artifact of the turn before."""
    refresh: Callable[[], Awaitable[PresignedTarget]] | None = field(default=None, repr=False)
    """In process only: a new grant when the old one has expired by the time of delivery."""

    def to_json(self) -> dict[str, Any]:
        """The request as it travels, secrets included, the URL's bytes unchanged."""
        if isinstance(self.target, PresignedTarget):
            target: dict[str, Any] = {
                "kind": "presigned_http_put",
                "url": self.target.url.reveal(),
                "expires_at": self.target.expires_at,
                "max_bytes": self.target.max_bytes,
                "required_headers": {name: value.reveal() for name, value in self.target.required_headers.items()},
                "object_id": self.target.object_id,
            }
        elif isinstance(self.target, ManagedTarget):
            target = {
                "kind": "managed_fsspec",
                "profile": self.target.profile,
                "object_key": self.target.object_key,
            }
        else:
            raise ArtifactRefusedError("a sink exists in this process only", code="artifact_invalid_request")
        made = {
            "format": self.format,
            "contents": list(self.contents),
            "codec": self.codec,
            "delivery": {"mode": "object_store", "target": target},
        }
        if self.parent is not None:
            kept = {name: getattr(self.parent, name) for name in self.parent.__dataclass_fields__}
            made["parent"] = {
                name: list(value) if isinstance(value, tuple) else value
                for name, value in kept.items()
                if value is not None
            }
        return made


def parse_request(value: object, *, strict: bool = False) -> ArtifactRequest:
    """The `generation_artifact` object of a request body. Raises `ArtifactRefusedError` (artifact_invalid_request).

    Messages never hold a URL, header or provider's text.
    """
    envelope = _object(value, "generation_artifact", "request")
    name = _text(envelope["format"], "format").strip()
    contents = envelope["contents"]
    if not isinstance(contents, list):
        raise _invalid("contents must be an array of strings")
    entries = tuple(_text(entry, "contents") for entry in contents)
    if len(set(entries)) != len(entries):
        raise _invalid("contents must not contain duplicates")
    codec = envelope.get("codec", "zstd")
    if codec != "zstd" or not isinstance(codec, str):
        raise _invalid("codec must be the string 'zstd'")
    delivery = _object(envelope["delivery"], "delivery", "delivery")
    if delivery["mode"] != "object_store":
        raise _invalid("delivery.mode must be 'object_store'")
    target = _parse_target(delivery["target"])
    parent = None if envelope.get("parent") is None else _parse_parent(envelope["parent"])
    return ArtifactRequest(format=name, contents=entries, codec="zstd", target=target, strict=strict, parent=parent)


def find_request(body: Mapping[str, Any]) -> tuple[ArtifactRequest, Literal["nvext", "native"]] | None:
    """The artifact request of a whole body and the spelling it came in, which is where the receipt goes.

    Raises `ArtifactRefusedError` when both spellings are given.
    """
    nvext = body.get("nvext")
    in_nvext = isinstance(nvext, Mapping) and nvext.get("generation_artifact") is not None
    native = body.get("generation_artifact") is not None
    if in_nvext and native:
        raise _invalid("give nvext.generation_artifact or generation_artifact, not both")
    if not (in_nvext or native):
        return None
    strict = body.get("generation_artifact_strict", False)
    if not isinstance(strict, bool):
        raise _invalid("generation_artifact_strict must be true or false")
    value = nvext["generation_artifact"] if in_nvext and nvext is not None else body["generation_artifact"]
    return parse_request(value, strict=strict), "nvext" if in_nvext else "native"


def redact(value: Any) -> Any:
    """A copy of any JSON value in which the URL and header values of presigned targets read [REDACTED]."""
    if isinstance(value, list | tuple):
        return [redact(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    copy = {key: redact(item) for key, item in value.items()}
    target = copy.get("generation_artifact")
    for step in ("delivery", "target"):
        target = target.get(step) if isinstance(target, dict) else None
    if isinstance(target, dict) and target.get("kind") == "presigned_http_put":
        if "url" in target:
            target["url"] = REDACTED
        if "required_headers" in target:
            headers = target["required_headers"]
            target["required_headers"] = dict.fromkeys(headers, REDACTED) if isinstance(headers, dict) else REDACTED
    return copy


def _parse_parent(value: object) -> ArtifactParent:
    """Its shape; the values are checked at admission."""
    parent = dict(_object(value, "parent", "parent"))
    fields = parent.get("fields")
    if fields is not None:
        if not isinstance(fields, list):
            raise _invalid("parent.fields must be an array of strings")
        parent["fields"] = tuple(_text(entry, "parent.fields") for entry in fields)
    return ArtifactParent(**parent)


def _parse_target(value: object) -> Target:
    if not isinstance(value, Mapping):
        raise _invalid("delivery.target must be an object")
    kind = value.get("kind")
    if kind not in ("presigned_http_put", "managed_fsspec"):
        raise _invalid("delivery.target.kind must be 'presigned_http_put' or 'managed_fsspec'")
    target = _object(value, "delivery.target", kind)
    if kind == "managed_fsspec":
        return ManagedTarget(_text(target["profile"], "profile"), _text(target["object_key"], "object_key"))
    size = target["max_bytes"]
    if isinstance(size, bool) or not isinstance(size, int) or not 0 < size < 2**64:
        raise _invalid("delivery.target.max_bytes must be a positive integer")
    headers = target.get("required_headers", {})
    if not isinstance(headers, Mapping) or not all(isinstance(item, str) for pair in headers.items() for item in pair):
        raise _invalid("delivery.target.required_headers must map strings to strings")
    return PresignedTarget(
        url=_text(target["url"], "url"),
        expires_at=_text(target["expires_at"], "expires_at"),
        max_bytes=size,
        object_id=_text(target["object_id"], "object_id"),
        required_headers=headers,
    )


def _object(value: object, name: str, level: str) -> Mapping[str, Any]:
    required, optional = _KEYS[level]
    if not isinstance(value, Mapping):
        raise _invalid(f"{name} must be an object")
    missing = sorted(required - set(value))
    if missing:
        raise _invalid(f"{name} lacks {', '.join(missing)}")
    if set(value) - required - optional:
        raise _invalid(f"{name} has an unknown key; it takes {', '.join(sorted(required | optional))}")
    return value


def _text(value: object, name: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise _invalid(f"{name} must be a string that is not blank")
    return value


def _invalid(message: str) -> ArtifactRefusedError:
    return ArtifactRefusedError(message, code="artifact_invalid_request")
