"""What the operator asks of generation artifacts: targets, limits, deadlines. Frozen; parsed once, at start."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

MAX_BYTES = 2**26
"""Wire constant of generation_artifact_v1; a larger object could also need a multipart upload, which is not atomic."""
MAX_KEY_BYTES = 1024
MAX_PROFILES_BYTES = 2**20
PROFILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
MAX_V2_DECODED = 2**34
"""What readers of generation_artifact_v2 accept by default."""
MAX_V2_BYTES = 5 * 2**30 - 1
"""Largest object that S3 takes in one request."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def check_object_key(text: str) -> str:
    """The key, trimmed. Raises `ValueError` unless it is a plain relative path that cannot leave its prefix."""
    key = text.strip()
    if not key or len(key.encode("utf-8", "surrogatepass")) > MAX_KEY_BYTES:
        raise ValueError(f"an object key has 1 to {MAX_KEY_BYTES} bytes")
    if _CONTROL.search(key) or "\\" in key or not key.isprintable():
        raise ValueError("an object key holds no control characters and no backslash")
    if key.startswith("/") or any(part in ("", ".", "..") for part in key.split("/")) or posixpath.normpath(key) != key:
        raise ValueError("an object key is a relative path without empty, '.' or '..' parts")
    return key


def _check_prefix(text: str) -> str:
    return check_object_key(text.strip().rstrip("/"))


def _digits(value: object) -> object:
    """Numbers in the environment and on the command line are decimal digits: no "1e5", "0x10" or "3600.0"."""
    if isinstance(value, str):
        if not re.fullmatch(r"[0-9]{1,18}", value):
            raise ValueError("write decimal digits")
        return int(value)
    return value


def _hosts(value: object) -> object:
    """ "a.example, B.example:8443" -> ("a.example", "b.example:8443")."""
    if isinstance(value, str):
        value = value.split(",")
    if isinstance(value, list | tuple) and all(isinstance(part, str) for part in value):
        return tuple(part.strip().lower() for part in value if part.strip())
    return value


def _profiles(value: object) -> object:
    if isinstance(value, str):
        if len(value) > MAX_PROFILES_BYTES:
            raise ValueError(f"the profiles take more than {MAX_PROFILES_BYTES} bytes")
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError("the profiles are not a JSON object") from None
    if isinstance(value, Mapping):
        if len(json.dumps(value, default=str)) > MAX_PROFILES_BYTES:
            raise ValueError(f"the profiles take more than {MAX_PROFILES_BYTES} bytes")
        wrong = [name for name in value if not (isinstance(name, str) and PROFILE_NAME.fullmatch(name))]
        if wrong:
            raise ValueError(f"{str(wrong[0])[:64]!r} is no profile name: letters, digits, '_', '.', '-', at most 64")
    return value


def _with_scheme(text: str) -> str:
    if "://" not in text:
        raise ValueError("write a URL with a scheme, such as s3://bucket/path or file:///absolute/directory")
    return text


def _literally_true(value: object) -> object:
    if value is not True:
        raise ValueError("write true: objects are never overwritten")
    return value


Whole = Annotated[int, BeforeValidator(_digits)]
Hosts = Annotated[tuple[str, ...], BeforeValidator(_hosts)]


class StorageProfile(BaseModel):
    """A place that requests may name. Credentials live here or in the process environment, never in a request."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    url: Annotated[str, Field(min_length=1), AfterValidator(_with_scheme)]
    """Root: s3://bucket/path, file:///absolute/directory, memory://name, or a scheme of a storage plugin."""
    storage_options: dict[str, Any] = Field(default_factory=dict, repr=False)
    """Arguments of the filesystem (key, secret, endpoint_url, ...)."""
    allowed_prefixes: Annotated[tuple[Annotated[str, AfterValidator(_check_prefix)], ...], Field(min_length=1)]
    """Object keys must be one of these or lie below one."""
    create_only: Annotated[Literal[True], BeforeValidator(_literally_true)]
    """Objects are never overwritten; there is no other way, so this must say true."""


class ArtifactsSection(BaseModel):
    """Generation artifacts. Nothing leaves the process until a target is allowed here."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    presigned_hosts: Hosts = ()
    """Exact host, or host:port, that presigned uploads may go to; empty: none."""
    max_presigned_ttl_seconds: Annotated[Whole, Field()] = 3600
    """Longest accepted remaining life of an upload grant; 0 refuses all."""
    allow_insecure_http: bool = False
    """For tests: plain http to the loopback authorities in insecure_http_hosts."""
    insecure_http_hosts: Hosts = ()
    """Exact loopback authorities, such as 127.0.0.1:9000, for allow_insecure_http."""
    presigned_connect_timeout_seconds: Annotated[Whole, Field(gt=0)] = 10
    """Seconds to connect to a presigned target."""
    presigned_timeout_seconds: Annotated[Whole, Field(gt=0)] = 60
    """Seconds for a whole presigned upload."""
    enable_managed_fsspec: bool = False
    """Let requests name a storage profile."""
    storage_profiles: Annotated[dict[str, StorageProfile], BeforeValidator(_profiles), Field(repr=False)] = Field(
        default_factory=dict
    )
    """Profiles by name, as JSON: {"runs": {"url": ..., "storage_options": {...}, "allowed_prefixes": [...],
    "create_only": true}}."""
    max_bytes: Annotated[Whole, Field(ge=1, le=MAX_BYTES)] = MAX_BYTES
    """Largest object for a managed target."""
    managed_timeout_seconds: Annotated[Whole, Field(gt=0)] = 60
    """Seconds for a whole managed write."""
    sink_timeout_seconds: Annotated[Whole, Field(gt=0)] = 600
    """Seconds that a program's own sink may take for an object."""
    max_decoded_bytes: Annotated[Whole, Field(ge=1, le=MAX_BYTES)] = MAX_BYTES
    """Largest payload of an artifact before compression."""
    v2_max_bytes: Annotated[Whole, Field(ge=1, le=MAX_V2_BYTES)] = 2**29
    """The same as max_bytes, for generation_artifact_v2."""
    v2_max_decoded_bytes: Annotated[Whole, Field(ge=1, le=MAX_V2_DECODED)] = 2**28
    """The same as max_decoded_bytes, for generation_artifact_v2. A request reserves about twice its size of process_bytes."""
    pipeline_concurrency: Annotated[Whole, Field(gt=0)] = 2
    """Artifacts that are encoded and uploaded at the same time."""
    process_bytes: Annotated[Whole, Field(gt=0)] = 2**30
    """Bytes that admitted artifacts, and captured rows for responses, may hold together; a request that does not fit
    waits, then gets 503."""
    queue_timeout_seconds: Annotated[Whole, Field(gt=0)] = 30
    """Longest wait for process_bytes, and for a place in the pipeline."""
    queue_limit: Annotated[Whole, Field(ge=0)] = 256
    """Finished artifacts that may wait for a place in the pipeline."""
    expiry_margin_seconds: Annotated[Whole, Field(ge=0)] = 15
    """Seconds for the upload itself when an upload grant's expiry is weighed at admission."""
    drain_timeout_seconds: Annotated[Whole, Field(ge=0)] = 60
    """Seconds that running deliveries have to finish when the engine closes."""
