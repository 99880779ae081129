"""A storage target: objects as files, `my-name:/absolute/path`, each whole or not at all.

Runs in a delivery task, one target per delivery; owns nothing after `aclose`.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from anyio import to_thread

from infer import StorageError, StorageNotFoundError
from infer.plugins import StorageTargetSpec, hookimpl

SCHEME = "my-name:"


class FileTarget:
    def __init__(self, uri: str, options: dict[str, Any]) -> None:
        path = Path(uri.removeprefix(SCHEME))
        if not uri.startswith(SCHEME) or not path.is_absolute():
            raise StorageError(f"{uri!r} is not of the form {SCHEME}/absolute/path")
        self._path = path

    async def put(self, data: bytes, *, if_absent: bool) -> None:
        await to_thread.run_sync(self._write, data, if_absent)

    async def aclose(self) -> None:
        """Nothing is held between calls."""

    # The four methods below are optional (`SupportsRead`).

    async def get(self, start: int = 0, end: int | None = None) -> bytes:
        return (await to_thread.run_sync(self._read))[start:end]

    async def exists(self) -> bool:
        return await to_thread.run_sync(self._path.is_file)

    async def list(self) -> list[str]:
        found = await to_thread.run_sync(lambda: sorted(self._path.parent.glob("*")))
        return [f"{SCHEME}{path}" for path in found if not path.name.startswith(".")]

    async def delete(self) -> None:
        await to_thread.run_sync(lambda: self._path.unlink(missing_ok=True))

    def _write(self, data: bytes, if_absent: bool) -> None:
        """Into a hidden file first; then one link, which fails if the name exists, or one rename, which replaces it."""
        partial: Path | None = None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(prefix=".", dir=self._path.parent)
            partial = Path(name)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if if_absent:
                self._path.hardlink_to(partial)
            else:
                partial.replace(self._path)
        except FileExistsError as error:
            raise StorageError(f"{self._path} exists already; choose another name or delete it") from error
        except OSError as error:  # a full disk may be emptied: worth another try
            raise StorageError(f"{self._path} cannot be written: {error.strerror}", retryable=True) from error
        finally:
            if partial is not None:
                partial.unlink(missing_ok=True)

    def _read(self) -> bytes:
        try:
            return self._path.read_bytes()
        except FileNotFoundError as error:
            raise StorageNotFoundError(f"there is no {self._path}") from error


@hookimpl
def infer_storage_targets() -> list[StorageTargetSpec]:
    return [
        StorageTargetSpec(
            name="my-name",
            api=1,
            factory=f"{__name__}:FileTarget",
            schemes=(SCHEME.removesuffix(":"),),
            example={"uri": SCHEME + "{tmp}/", "faults": "infer.testing.storage_faults:disk"},
        )
    ]
