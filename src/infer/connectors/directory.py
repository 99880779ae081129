"""The KV connector `directory`: blocks as files, shared by every engine on the machine, kept over restarts.

A directory in /dev/shm is a tier in memory. Files are whole or not there; the oldest go when there are too many bytes.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from infer.config.units import parse_bytes
from infer.errors import ConfigError
from infer.plugins import hookimpl
from infer.plugins.kv_connector import API_VERSION, KVConnectorSpec, KVFacts
from infer.plugins.kv_store import StoreMatcher, StoreTransfer

DEFAULT_BYTES = 16 * 2**30
KEEP = 0.9
"""Share of the bytes that is left when the oldest files are removed."""
LOOK_AGAIN = 8
"""Others write too: what is there is counted anew after writing one in so many of the bytes allowed."""
ABANDONED = 3600.0
"""Seconds after which an unfinished file is nobody's."""
_SUFFIX = ".kv"
_PARTIAL = ".partial"


class DirectoryStore:
    """A `KVStore` of files `root/xx/KEY.kv`. Reading a file makes it young."""

    def __init__(self, root: Path, max_bytes: int) -> None:
        self._root = root
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._num_bytes: int | None = None
        """As of the last count and what was written since; None before the first."""
        self._written = 0

    def contains(self, keys: Sequence[str]) -> list[bool]:
        return [self._path(key).is_file() for key in keys]

    def get(self, keys: Sequence[str]) -> list[bytes | None]:
        return [self._read(self._path(key)) for key in keys]

    def put(self, values: Mapping[str, bytes]) -> None:
        for key, value in values.items():
            with self._lock:
                if len(value) > self._max_bytes:
                    continue
                self._make_room(len(value))
                self._write(self._path(key), value)

    def close(self) -> None:
        """Files are closed after each use."""

    def _path(self, key: str) -> Path:
        return self._root / key.rpartition("-")[0][-2:] / (key + _SUFFIX)

    def _read(self, path: Path) -> bytes | None:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        with os.fdopen(descriptor, "rb") as file:
            with contextlib.suppress(OSError):  # another user's file can be read all the same
                os.utime(descriptor)
            return file.read()

    def _write(self, path: Path, value: bytes) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = path.with_name(f"{secrets.token_hex(12)}{_PARTIAL}")
        try:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(value)
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        self._written += len(value)
        self._num_bytes = (self._num_bytes or 0) + len(value)

    def _make_room(self, num_bytes: int) -> None:
        if self._num_bytes is None or self._written * LOOK_AGAIN > self._max_bytes:
            self._num_bytes = sum(size for _, size, _ in self._files())
            self._written = 0
        if self._num_bytes + num_bytes <= self._max_bytes:
            return
        files = sorted(self._files())
        left = sum(size for _, size, _ in files)
        for _, size, path in files:
            if left + num_bytes <= self._max_bytes * KEEP or not left:
                break
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            left -= size
        self._num_bytes, self._written = left, 0

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """(last use, bytes, path) of every value, of every model. What was begun and abandoned goes."""
        for folder, _, names in os.walk(self._root):
            for name in names:
                path = Path(folder, name)
                with contextlib.suppress(FileNotFoundError):
                    facts = path.lstat()
                    if name.endswith(_SUFFIX):
                        yield facts.st_mtime, facts.st_size, path
                    elif name.endswith(_PARTIAL) and facts.st_mtime < time.time() - ABANDONED:
                        path.unlink()


def open_store(options: Mapping[str, Any]) -> DirectoryStore:
    """`path`, an absolute directory that is made if it is not there; `max_bytes`, 16 GiB if not given. Raises `ConfigError`."""
    unknown = sorted(set(options) - {"path", "max_bytes"})
    if unknown:
        raise _refusal(f"has no option {unknown[0]!r}; it takes path and max_bytes")
    path = options.get("path")
    if not isinstance(path, str) or not Path(path).is_absolute():
        raise _refusal(f"needs path, an absolute directory, not {path!r}")
    max_bytes = options.get("max_bytes", DEFAULT_BYTES)
    try:
        max_bytes = int(parse_bytes(max_bytes))  # type: ignore[call-overload]
    except (TypeError, ValueError) as error:
        raise _refusal(f"max_bytes={max_bytes!r}: {error}") from None
    if max_bytes < 1:
        raise _refusal(f"max_bytes={max_bytes}: write a number of bytes, such as 16GiB")
    root = Path(path)
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(root, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(f"no permission to read and write in {path}")
    except OSError as error:
        raise _refusal(f"path={path!r}: {error}; name a directory that can be written") from error
    return DirectoryStore(root, max_bytes)


def _refusal(problem: str) -> ConfigError:
    return ConfigError(f"kv_connector.options: the connector 'directory' {problem}", fields=("kv_connector.options",))


def scheduler_half(options: dict[str, Any], facts: KVFacts) -> StoreMatcher:
    return StoreMatcher(open_store(options), facts)


def worker_half(options: dict[str, Any], facts: KVFacts) -> StoreTransfer:
    return StoreTransfer(open_store(options), facts)


@hookimpl
def infer_kv_connectors() -> list[KVConnectorSpec]:
    return [
        KVConnectorSpec(
            name="directory",
            api=API_VERSION,
            factory="infer.connectors.directory:scheduler_half",
            worker_factory="infer.connectors.directory:worker_half",
            example={"path": "{tmp}/blocks", "max_bytes": "64MiB"},
        )
    ]
