"""The file of a step log: zstd frames of length-prefixed records, written by a thread of its own, in two files of bounded size.

`append` is called in the loop task and never waits for the disk. Owns the thread and the open file.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from pathlib import Path
from typing import BinaryIO

import zstandard

from infer.errors import ConfigError

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 0.5
"""Oldest record that a crash can lose."""
MAX_BUFFERED = 8 * 2**20
"""Bytes that wait for the disk at most; then records are lost, and the next file says so."""


class LogFile:
    """`path` and, once that has half of `max_bytes`, the file before it as `path.1`. Raises `ConfigError` when the path
    cannot be written or another engine writes to it."""

    def __init__(self, path: str | Path, max_bytes: int) -> None:
        self._path = Path(path)
        self._max_file_bytes = max_bytes // 2
        self._compressor = zstandard.ZstdCompressor(level=3)
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._items: list[bytes | None] = []
        """Records in order; None: a new file begins."""
        self._num_buffered = 0
        self._closing = False
        self.is_full = False
        """The file has its size: the next record should begin another."""
        self.has_lost = False
        """A record found no room in the buffer. Cleared by `begin`."""
        self.failure: str | None = None
        """Why nothing is written any more."""
        try:
            self._file: BinaryIO = self._open()
        except OSError as error:
            raise ConfigError(
                f"step_log.path={str(path)!r} cannot be written: {error.strerror or error}; name a file in a directory that "
                "exists and may be written",
                fields=("step_log.path",),
            ) from error
        self._thread = threading.Thread(target=self._run, name="infer step log", daemon=True)
        self._thread.start()

    def append(self, record: bytes) -> None:
        """Take a record; nothing of the kind once some were lost, until a new file begins."""
        if self.failure is not None or self.has_lost:
            return
        with self._lock:
            if self._num_buffered + len(record) > MAX_BUFFERED:
                self.has_lost = True
                return
            self._put(record)

    @property
    def is_behind(self) -> bool:
        """The disk has too much to write for a new file to begin."""
        return self._num_buffered > MAX_BUFFERED // 2

    def begin(self, records: list[bytes]) -> bool:
        """Go on in a new file, which begins with these. False when the disk is too far behind to start one."""
        with self._lock:
            if self.is_behind:
                return False
            self._items.append(None)
            for record in records:
                self._put(record)
            self.has_lost = self.is_full = False
            return True

    def close(self, timeout: float | None = 10.0) -> None:
        """Write what is left and let go of the file. A disk that does not answer is left alone after `timeout` seconds."""
        with self._lock:
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout)
        if self._thread.is_alive():
            logger.warning("the step log %s was left unfinished: the disk does not answer", self._path)

    def give_up(self, reason: str) -> None:
        """Nothing is written any more."""
        if self.failure is None:
            self.failure = reason
            logger.warning("the step log %s stops here, the engine goes on: %s", self._path, reason)

    # -- parts ---------------------------------------------------------------------------------------------------

    def _put(self, record: bytes) -> None:
        self._items.append(len(record).to_bytes(4, "little") + record)
        self._num_buffered += len(record) + 4
        if self._num_buffered > 2**20:
            self._wake.notify()

    def _open(self) -> BinaryIO:
        """A file under the path that is ours alone; what was there becomes the file before it."""
        file = os.fdopen(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise ConfigError(
                f"step_log.path={str(self._path)!r} is being written by another engine; give each engine a path of its own",
                fields=("step_log.path",),
            ) from None
        if os.fstat(file.fileno()).st_size:
            file.close()
            return self._next_file()
        return file

    def _next_file(self) -> BinaryIO:
        self._path.replace(f"{self._path}.1")
        file = os.fdopen(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "r+b")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return file

    def _run(self) -> None:
        try:
            while self._write_some():
                pass
        except OSError as error:
            self.give_up(str(error))
        finally:
            self._file.close()

    def _write_some(self) -> bool:
        """One frame per file with what came since the last call; False when it was the last."""
        with self._lock:
            if not self._closing:
                self._wake.wait(FLUSH_SECONDS)
            items, self._items = self._items, []
            self._num_buffered, closing = 0, self._closing
        piece: list[bytes] = []
        for item in items:
            if item is not None:
                piece.append(item)
                continue
            self._write(piece)
            piece = []
            before, self._file = self._file, self._next_file()
            before.close()
        self._write(piece)
        return not closing

    def _write(self, records: list[bytes]) -> None:
        if not records:
            return
        self._file.write(self._compressor.compress(b"".join(records)))
        self._file.flush()
        if self._file.tell() >= self._max_file_bytes:
            self.is_full = True
