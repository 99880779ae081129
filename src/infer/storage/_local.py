"""Objects as files below a root that nothing leads out of, created atomically and synced. Blocks; runs on a worker thread."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from infer.errors import StorageError, StorageNotFoundError

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class LocalObject:
    """`key` below the directory `root`. Every step is taken relative to an open directory, following no link."""

    def __init__(self, root: str, key: str) -> None:
        if not root.startswith("/"):
            raise StorageError("a file profile needs an absolute directory", code="artifact_target_rejected")
        *self._folders, self._name = key.split("/")
        if any(part in ("", ".", "..") for part in (*self._folders, self._name)):
            raise StorageError("the object key leaves its root", code="artifact_target_rejected")
        self._root = root
        self.writing = False

    def put(self, data: bytes, *, if_absent: bool) -> None:
        with self._folder(create=True) as folder:
            temporary = f".partial-{secrets.token_hex(12)}"
            try:
                self._write(folder, temporary, data)
                self.writing = True
                if if_absent:
                    os.link(temporary, self._name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
                else:
                    os.replace(temporary, self._name, src_dir_fd=folder, dst_dir_fd=folder)
                os.fsync(folder)
            except FileExistsError:
                raise StorageError("an object exists already", code="artifact_conflict") from None
            except OSError as error:
                raise _failure(error) from None
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=folder)

    def get(self, start: int, end: int | None) -> bytes:
        with self._folder(create=False) as folder:
            try:
                handle = os.open(self._name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            except FileNotFoundError:
                raise _absent() from None
            with os.fdopen(handle, "rb") as file:
                file.seek(start)
                return file.read() if end is None else file.read(max(0, end - start))

    def exists(self) -> bool:
        try:
            with self._folder(create=False) as folder:
                os.stat(self._name, dir_fd=folder, follow_symlinks=False)
        except (FileNotFoundError, StorageNotFoundError):
            return False
        return True

    def list(self) -> list[str]:
        with self._folder(create=False) as folder:
            return sorted(
                "/".join((*self._folders, name))
                for name in os.listdir(folder)  # noqa: PTH208  a descriptor has no path
                if not name.startswith(".partial-")
            )

    def delete(self) -> None:
        with self._folder(create=False) as folder:
            try:
                os.unlink(self._name, dir_fd=folder)
            except FileNotFoundError:
                raise _absent() from None

    def close(self) -> None:
        """Nothing stays open between calls."""

    def _write(self, folder: int, name: str, data: bytes) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(name, flags, 0o666, dir_fd=folder)
        with os.fdopen(handle, "wb", buffering=0) as file:
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
            os.fsync(handle)

    @contextlib.contextmanager
    def _folder(self, *, create: bool) -> Iterator[int]:
        """The key's directory, opened one component at a time."""
        try:
            if create:
                Path(self._root).mkdir(parents=True, exist_ok=True)
            handle = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise _failure(error) from None
        try:
            for part in self._folders:
                inner = self._step(handle, part, create)
                os.close(handle)
                handle = inner
            yield handle
        finally:
            os.close(handle)

    def _step(self, folder: int, part: str, create: bool) -> int:
        try:
            if create:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=folder)
            return os.open(part, _DIRECTORY, dir_fd=folder)
        except OSError as error:
            raise _failure(error) from None


def _failure(error: OSError) -> StorageError:
    if isinstance(error, FileNotFoundError):
        return _absent()
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        return StorageError("the object key leads through a link or a file", code="artifact_upload_rejected")
    if error.errno in _FULL:
        return StorageError("there is no space left for the object", retryable=True, code="artifact_upload_rejected")
    return StorageError("managed artifact write failed", retryable=True)


def _absent() -> StorageNotFoundError:
    return StorageNotFoundError("the object does not exist")
