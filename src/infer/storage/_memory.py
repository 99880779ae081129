"""Objects in fsspec's process-wide memory filesystem, create-only and capped. For tests and callers in the same process."""

from __future__ import annotations

from typing import Any

from fsspec.implementations.memory import MemoryFile, MemoryFileSystem  # type: ignore[import-untyped]

from infer.errors import StorageError, StorageNotFoundError

DEFAULT_CAP = 2**28


class MemoryObject:
    """`key` below memory://`root`; `storage_options["max_bytes"]` caps everything below the root together."""

    def __init__(self, root: str, key: str, options: dict[str, Any]) -> None:
        self._prefix = f"/{root.strip('/')}/"
        self._path = f"{self._prefix}{key}"
        self._cap = int(options.get("max_bytes", DEFAULT_CAP))
        self._store: dict[str, Any] = MemoryFileSystem.store
        self.writing = False

    def put(self, data: bytes, *, if_absent: bool) -> None:
        made = MemoryFile(None, self._path, data)
        self.writing = True
        if not if_absent:
            self._store[self._path] = made
        elif self._store.setdefault(self._path, made) is not made:  # one step: exactly one of many writers wins
            raise StorageError("an object exists already", code="artifact_conflict")
        if self._held() > self._cap:
            del self._store[self._path]
            raise StorageError("there is no space left for the object", retryable=True, code="artifact_upload_rejected")

    def get(self, start: int, end: int | None) -> bytes:
        if not self.exists():
            raise StorageNotFoundError("the object does not exist")
        content: bytes = self._store[self._path].getvalue()
        return content[start:end]

    def exists(self) -> bool:
        return self._path in self._store

    def list(self) -> list[str]:
        return sorted(path[len(self._prefix) :] for path in list(self._store) if path.startswith(self._prefix))

    def delete(self) -> None:
        if self._store.pop(self._path, None) is None:
            raise StorageNotFoundError("the object does not exist")

    def close(self) -> None:
        """Nothing is open."""

    def _held(self) -> int:
        return sum(len(item.getbuffer()) for path, item in list(self._store.items()) if path.startswith(self._prefix))
