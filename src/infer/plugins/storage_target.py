"""Contract of a storage target (hook `infer_storage_targets`): where artifacts are delivered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

API_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageTargetSpec:
    name: str
    api: int
    factory: str
    """"module:attr", called once per delivery as `factory(uri: str, options: dict) -> StorageTarget`."""
    schemes: tuple[str, ...]
    """URL schemes it answers to."""
    example: dict[str, Any]
    """{"uri": ..., "options": {...}} for the kit, which appends object names to the uri; "{tmp}" in it stands for a
    scratch directory. "create_only": True for a target that can never replace an object. "faults": "module:attr" of what makes
    the store fail under test ("infer.testing.storage_faults:disk" for one on local disk)."""


class StorageTarget(Protocol):
    async def put(self, data: bytes, *, if_absent: bool) -> None:
        """Store the whole object atomically. With if_absent an existing object raises `StorageError`."""
        ...

    async def aclose(self) -> None: ...


@runtime_checkable
class SupportsExpiry(Protocol):
    """A target that is a grant for a while."""

    @property
    def expires_at(self) -> float:
        """Unix time from which `put` refuses."""
        ...


@runtime_checkable
class SupportsRead(Protocol):
    async def get(self, start: int = 0, end: int | None = None) -> bytes: ...

    async def exists(self) -> bool: ...

    async def list(self) -> list[str]: ...

    async def delete(self) -> None: ...
