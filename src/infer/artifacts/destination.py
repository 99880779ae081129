"""From what a request names to a storage target that may be written: one target object per delivery, made at admission.

Runs in the request's task; touches no network.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from infer.artifacts.request import ArtifactRequest, ManagedTarget, PresignedTarget, SinkTarget
from infer.artifacts.v2.limits import FORMAT as FORMAT_V2
from infer.config.artifacts import PROFILE_NAME, ArtifactsSection, check_object_key
from infer.errors import ArtifactRefusedError, ConfigError, StorageError, UnknownPluginError, shown
from infer.plugins.registry import Registry
from infer.plugins.storage_target import StorageTarget, SupportsExpiry

PRESIGNED = "presigned_http_put"
GRACE_SECONDS = 5.0
"""For a target to keep its own deadline."""


@dataclass(frozen=True, slots=True)
class Destination:
    """Where one object goes."""

    target: StorageTarget
    max_bytes: int
    object_id: str
    seconds: float
    """After which a write is given up, should the target not have done so itself."""
    expires_at: float | None = None
    """Unix time, for targets that expire."""


class _SinkStorage:
    """A callable as a storage target."""

    def __init__(self, sink: SinkTarget) -> None:
        self._sink = sink
        self.object_id = "sink"

    async def put(self, data: bytes, *, if_absent: bool) -> None:
        name: object = await self._sink.sink(data)
        if name is not None:
            self.object_id = str(name)

    async def aclose(self) -> None:
        pass


def resolve_destination(request: ArtifactRequest, settings: ArtifactsSection, registry: Registry) -> Destination:
    """Every rule of the target. Raises `ArtifactRefusedError` (artifact_target_rejected) with a fixed message."""
    if request.refresh is not None and not is_async(request.refresh):
        raise _rejected("refresh must be an `async def`")
    if isinstance(request.target, SinkTarget):
        if type(request.target.max_bytes) is not int or not is_async(request.target.sink):
            raise _rejected("a sink needs an integer max_bytes and a function that is an `async def`")
        sink = _SinkStorage(request.target)
        return Destination(sink, request.target.max_bytes, sink.object_id, settings.sink_timeout_seconds)
    try:
        if isinstance(request.target, PresignedTarget):
            return _presigned(request.target, settings, registry)
        limit = settings.v2_max_bytes if request.format == FORMAT_V2 else settings.max_bytes
        return _managed(request.target, settings, registry, limit)
    except StorageError as error:
        raise _rejected(str(error)) from None


def is_async(function: object) -> bool:
    """Whether a call of it is known to give something to await, before it is called."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


_SWITCHES = (("storage_profiles", "enable_managed_fsspec"), ("insecure_http_hosts", "allow_insecure_http"))
"""What is there for nothing without its switch."""


def check_targets(settings: ArtifactsSection, registry: Registry) -> None:
    """At start: what is set is in force, or switched off on purpose, and somebody answers for every profile's scheme. Raises
    `ConfigError`, which shows nothing of a URL but its scheme."""
    for name, switch in _SWITCHES:
        if getattr(settings, name) and switch not in settings.model_fields_set:
            raise ConfigError(
                f"artifacts.{name} is set, and without artifacts.{switch} nothing of it is used: set that to true, or to "
                "false on purpose",
                fields=(f"artifacts.{name}", f"artifacts.{switch}"),
            )
    known = _managed_schemes(registry)
    for name, profile in settings.storage_profiles.items():
        if _scheme(profile.url) not in known:
            raise ConfigError(
                f"artifacts.storage_profiles.{name}.url: no storage plugin answers for {shown(_scheme(profile.url))}; there are "
                f"{', '.join(sorted(known))}",
                fields=("artifacts.storage_profiles",),
            )


def _presigned(grant: PresignedTarget, settings: ArtifactsSection, registry: Registry) -> Destination:
    options = {
        "expires_at": grant.expires_at,
        "max_bytes": grant.max_bytes,
        "object_id": grant.object_id,
        "required_headers": {name: value.reveal() for name, value in grant.required_headers.items()},
        "hosts": settings.presigned_hosts,
        "insecure_hosts": settings.insecure_http_hosts if settings.allow_insecure_http else (),
        "max_ttl_seconds": settings.max_presigned_ttl_seconds,
        "connect_timeout_seconds": settings.presigned_connect_timeout_seconds,
        "timeout_seconds": settings.presigned_timeout_seconds,
    }
    target: StorageTarget = registry.create("storage_target", PRESIGNED, grant.url.reveal(), options)
    expires = target.expires_at if isinstance(target, SupportsExpiry) else None
    seconds = settings.presigned_timeout_seconds + GRACE_SECONDS
    return Destination(target, grant.max_bytes, grant.object_id.strip(), seconds, expires)


def _managed(named: ManagedTarget, settings: ArtifactsSection, registry: Registry, max_bytes: int) -> Destination:
    if not settings.enable_managed_fsspec:
        raise _rejected("managed artifact targets are not enabled")
    if not isinstance(named.profile, str) or not PROFILE_NAME.fullmatch(named.profile):
        raise _rejected("the storage profile's name is not well formed")
    profile = settings.storage_profiles.get(named.profile)
    if profile is None:
        raise _rejected("the storage profile is unknown")
    try:
        key = check_object_key(named.object_key)
    except (ValueError, AttributeError) as error:
        raise _rejected(str(error) if isinstance(error, ValueError) else "the object key must be text") from None
    if not any(key == prefix or key.startswith(f"{prefix}/") for prefix in profile.allowed_prefixes):
        raise _rejected("the object key is outside the profile prefix")
    name = _managed_schemes(registry).get(_scheme(profile.url))
    if name is None:
        raise _rejected("the profile's scheme is not allowed")
    options = {
        "root": profile.url,
        "storage_options": dict(profile.storage_options),
        "timeout_seconds": settings.managed_timeout_seconds,
    }
    try:
        target: StorageTarget = registry.create("storage_target", name, f"{profile.url.rstrip('/')}/{key}", options)
    except UnknownPluginError:
        raise _rejected("the profile's scheme is not allowed") from None
    seconds = settings.managed_timeout_seconds + GRACE_SECONDS
    return Destination(target, max_bytes, f"{named.profile}:{key}", seconds)


def _managed_schemes(registry: Registry) -> dict[str, str]:
    """Scheme -> the storage target that answers for it."""
    found: dict[str, str] = {}
    for spec in registry.specs("storage_target"):
        if spec.name != PRESIGNED:
            for scheme in spec.schemes:
                found.setdefault(scheme, spec.name)
    return found


def _scheme(url: str) -> str:
    return url.partition("://")[0].lower()


def _rejected(message: str) -> ArtifactRefusedError:
    return ArtifactRefusedError(message, code="artifact_target_rejected")
