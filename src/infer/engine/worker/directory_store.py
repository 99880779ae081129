"""A block store that other processes can read: one file per object, complete from the moment it has its name.

Called by one thread; owns one directory, locked so that no second engine writes to it, and what is in it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
from pathlib import Path

from infer.config.capture import OBJECT_SUFFIX
from infer.config.units import format_bytes
from infer.engine.worker.block_store import MissingBlockError, SlotStore
from infer.errors import ConfigError

TEMPORARY = ".tmp"
LOCK = "lock"


class DirectoryStore(SlotStore):
    """A `BlockStore` whose objects are files named by the hex of their key. A slot is only counted."""

    def __init__(self, directory: Path, descriptor: int, object_bytes: int, num_objects: int) -> None:
        """Adopts the directory, with the objects in it, and the descriptor of its lock."""
        super().__init__(object_bytes, num_objects)
        self._directory = directory
        self._descriptor = descriptor
        self._digests: dict[bytes, bytes] = {}
        """Of what this run wrote: a file can change without changing its size."""
        self._adopt()

    def _adopt(self) -> None:
        """Objects of an earlier run, the oldest to be evicted first. A key says which run it is from, so that none of them
        is ever taken for one of this run. What is not a whole object goes."""
        whole = []
        for path in self._directory.iterdir():
            if path.suffix not in (TEMPORARY, OBJECT_SUFFIX):
                continue
            key = bytes.fromhex(path.stem)  # what is not named as ours stops the start, and stays
            facts = path.stat()
            if path.suffix == OBJECT_SUFFIX and facts.st_size == self.object_bytes:
                whole.append((facts.st_mtime_ns, key))
            else:
                path.unlink()
        whole.sort(reverse=True)
        for _, key in whole[self.num_objects :]:
            self._erase(key)
        for _, key in reversed(whole[: self.num_objects]):
            self._slots[key] = self._num_touched
            self._idle[key] = None
            self._num_touched += 1

    def _path(self, key: bytes, suffix: str = OBJECT_SUFFIX) -> Path:
        return self._directory / (key.hex() + suffix)

    def _save(self, key: bytes, slot: int, data: bytes) -> None:
        """A reader finds the old object, or all of the new one."""
        unfinished = self._path(key, TEMPORARY)
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            written = os.write(descriptor, data)
        finally:
            os.close(descriptor)
        if written != len(data):
            unfinished.unlink()
            raise OSError(f"{unfinished}: {written} of {len(data)} bytes were written")
        unfinished.rename(self._path(key))
        self._digests[key] = _digest(data)

    def _load(self, key: bytes, slot: int) -> bytes:
        data = _plain_file(self._path(key), self.object_bytes)
        found = _digest(data)
        if len(data) != self.object_bytes or self._digests.get(key, found) != found:
            self.discard([key])
            raise MissingBlockError(
                f"no whole object is left under key {key.hex()}: who changes {self._directory}?", key=key
            )
        return data

    def _erase(self, key: bytes) -> None:
        self._digests.pop(key, None)
        for suffix in (OBJECT_SUFFIX, TEMPORARY):
            with contextlib.suppress(OSError):  # whatever is in the way there, nobody takes it for an object
                self._path(key, suffix).unlink()

    def _free_backing(self) -> None:
        """The objects stay, for whoever has keys."""
        os.close(self._descriptor)


def _plain_file(path: Path, size: int) -> bytes:
    """The first `size` + 1 bytes, or none. Follows no link and waits for nobody: what is not a file is not an object."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return b""
        pieces = []
        while size >= 0 and (piece := os.read(descriptor, size + 1)):
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def directory_store(directory: Path, object_bytes: int, num_objects: int) -> DirectoryStore:
    """In files in `directory`, which is made if it does not exist and is this user's alone.

    Raises `ConfigError` when it cannot be written, is another engine's, or has no room for all objects.
    """
    setting = f"capture.store_dir={str(directory)!r}"
    try:
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        directory.chmod(0o700)
        descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            f"{setting}: {error}; name a directory that can be written", fields=("capture.store_dir",)
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        store = DirectoryStore(directory, descriptor, object_bytes, num_objects)
        missing, free = (num_objects - store._num_touched) * object_bytes, shutil.disk_usage(directory).free
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(
            f"{setting}: another engine writes there; give each its own directory", fields=("capture.store_dir",)
        ) from None
    except (OSError, ValueError) as error:
        os.close(descriptor)
        raise ConfigError(
            f"{setting}: what is there cannot be used: {error}; name another directory", fields=("capture.store_dir",)
        ) from error
    if missing > free:
        store.close()
        raise ConfigError(
            f"{setting}: the store takes {format_bytes(missing)} more and {format_bytes(free)} are free there; lower "
            "capture.max_bytes, or name another directory",
            fields=("capture.store_dir", "capture.max_bytes"),
        )
    return store
