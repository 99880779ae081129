"""Storage target: an object below an operator's profile, created and never overwritten: S3, a local directory, memory.

The blocking work runs on worker threads, so that any event loop will do. Owns its filesystem; nothing is cached or shared.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import anyio
import anyio.to_thread

from infer.errors import InferError, StorageError
from infer.plugins.hookspecs import hookimpl
from infer.plugins.storage_target import API_VERSION, StorageTargetSpec
from infer.storage._local import LocalObject
from infer.storage._memory import MemoryObject
from infer.storage._s3 import S3Object

SCHEMES = ("s3", "s3a", "file", "memory")
T = TypeVar("T")


class BlockingObject(Protocol):
    """One object of one filesystem; every method may block."""

    writing: bool
    """Set before the first byte may become visible."""

    def put(self, data: bytes, *, if_absent: bool) -> None: ...

    def get(self, start: int, end: int | None) -> bytes: ...

    def exists(self) -> bool: ...

    def list(self) -> list[str]: ...

    def delete(self) -> None: ...

    def close(self) -> None: ...


class FsspecTarget:
    """A blocking object behind the asynchronous contract, with one deadline over set-up and write."""

    def __init__(self, made: BlockingObject, seconds: float) -> None:
        self._object = made
        self._seconds = seconds

    async def put(self, data: bytes, *, if_absent: bool) -> None:
        try:
            await self._run(lambda: self._object.put(data, if_absent=if_absent))
        except TimeoutError:
            if self._object.writing:
                raise StorageError(
                    "the object may or may not have been stored", code="artifact_outcome_unknown"
                ) from None
            raise StorageError(
                "the managed artifact write did not finish in time", retryable=True, code="artifact_upload_timeout"
            ) from None

    async def get(self, start: int = 0, end: int | None = None) -> bytes:
        return await self._read(lambda: self._object.get(start, end))

    async def exists(self) -> bool:
        return await self._read(self._object.exists)

    async def list(self) -> list[str]:
        return await self._read(self._object.list)

    async def delete(self) -> None:
        await self._read(self._object.delete)

    async def aclose(self) -> None:
        """Bounded, and never an error: what was written is written."""
        with anyio.move_on_after(min(self._seconds, 5)):
            await anyio.to_thread.run_sync(self._object.close, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1))

    async def _read(self, work: Callable[[], T]) -> T:
        try:
            return await self._run(work)
        except TimeoutError:
            raise StorageError("the managed target did not answer in time", retryable=True) from None

    async def _run(self, work: Callable[[], T]) -> T:
        """On a thread that is left behind when the deadline passes; it holds none of the pool's places."""
        with anyio.fail_after(self._seconds):
            try:
                return await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1))
            except InferError:
                raise
            except TimeoutError:
                raise StorageError("managed artifact write failed", retryable=True) from None
            except Exception:  # a provider's text must not travel on
                raise StorageError("managed artifact write failed", retryable=True) from None


def create(uri: str, options: dict[str, Any]) -> FsspecTarget:
    """`uri` is an object below `options["root"]` (its own directory when absent); `storage_options` are the filesystem's,
    `timeout_seconds` is the deadline. Opens nothing. Raises `StorageError` (artifact_target_rejected)."""
    scheme, separator, path = uri.partition("://")
    root = options.get("root") or uri.rpartition("/")[0]
    if not separator or scheme not in SCHEMES or not uri.startswith(f"{root.rstrip('/')}/"):
        raise StorageError("the profile's scheme is not allowed", code="artifact_target_rejected")
    key = uri[len(root.rstrip("/")) + 1 :]
    seconds = float(options.get("timeout_seconds", 60))
    storage_options = dict(options.get("storage_options", {}))
    made: BlockingObject
    if scheme == "file":
        made = LocalObject(root.partition("://")[2], key)
    elif scheme == "memory":
        made = MemoryObject(root.partition("://")[2], key, storage_options)
    else:
        if importlib.util.find_spec("s3fs") is None:
            raise StorageError(
                "s3 profiles need another package: pip install 'infer-engine[s3]'", code="artifact_target_rejected"
            )
        made = S3Object(scheme, path, storage_options, seconds)
    return FsspecTarget(made, seconds)


@hookimpl
def infer_storage_targets() -> list[StorageTargetSpec]:
    return [
        StorageTargetSpec(
            name="managed_fsspec",
            api=API_VERSION,
            factory="infer.storage.fsspec_target:create",
            schemes=SCHEMES,
            example={"uri": "file://{tmp}/", "options": {"storage_options": {}}},
        )
    ]
