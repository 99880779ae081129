"""The file of a step log: bounded, never in the way, and honest about what is missing."""

from __future__ import annotations

import errno
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from infer.engine.step_log import log_file
from infer.engine.step_log.log_file import LogFile
from infer.errors import ConfigError


def contents(path: Path) -> list[bytes]:
    data = zstandard.ZstdDecompressor().stream_reader(path.read_bytes(), read_across_frames=True).read()
    out = []
    while data:
        size = int.from_bytes(data[:4], "little")
        out.append(data[4 : 4 + size])
        data = data[4 + size :]
    return out


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_records_are_there_in_order_and_for_the_owner_alone(tmp_path: Path) -> None:
    file = LogFile(tmp_path / "a", 2**20)
    for index in range(1000):
        file.append(str(index).encode())
    file.close()
    assert contents(tmp_path / "a") == [str(index).encode() for index in range(1000)]
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600


def test_a_record_reaches_the_disk_without_another(tmp_path: Path) -> None:
    """What a killed process leaves behind."""
    file = LogFile(tmp_path / "a", 2**20)
    file.append(b"x")
    wait_for(lambda: (tmp_path / "a").stat().st_size > 0)
    assert contents(tmp_path / "a") == [b"x"]
    file.close()


def test_two_files_hold_what_was_asked_for(tmp_path: Path) -> None:
    import random

    chance = random.Random(0)
    file = LogFile(tmp_path / "a", 2**17)
    for index in range(400):
        if file.is_full:
            assert file.begin([b"begin"])
        file.append(chance.randbytes(1000))
        if index % 20 == 0:
            wait_for(lambda: file._num_buffered == 0)
    file.close()
    assert {path.name for path in tmp_path.iterdir()} == {"a", "a.1"}
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2**17 + 2 * 21_000
    assert contents(tmp_path / "a")[0] == b"begin"


def test_what_was_there_becomes_the_file_before(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    LogFile(tmp_path / "a", 2**20).close()
    assert (tmp_path / "a.1").read_bytes() == b"old"


def test_one_engine_a_path(tmp_path: Path) -> None:
    file = LogFile(tmp_path / "a", 2**20)
    file.append(b"mine")
    with pytest.raises(ConfigError, match=r"is being written by another engine; give each engine a path of its own"):
        LogFile(tmp_path / "a", 2**20)
    file.close()
    assert contents(tmp_path / "a") == [b"mine"]
    LogFile(tmp_path / "a", 2**20).close()


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"step_log.path=.*nowhere/a' cannot be written: No such file or directory"):
        LogFile(tmp_path / "nowhere" / "a", 2**20)
    with pytest.raises(ConfigError, match=r"cannot be written: Is a directory"):
        LogFile(tmp_path, 2**20)


def test_a_full_disk_ends_the_log_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = LogFile(tmp_path / "a", 2**20)

    def full(data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with file._lock:
        file._file.close()
        file._file = Disk(full)  # type: ignore[assignment]
    file.append(b"x")
    wait_for(lambda: file.failure is not None)
    file.append(b"y")
    file.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"the step log {tmp_path / 'a'} stops here, the engine goes on: [Errno 28] No space left on device"
    ]


def test_a_slow_disk_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records are lost whole, from one on until a new file begins, which says so; memory stays bounded."""
    monkeypatch.setattr(log_file, "MAX_BUFFERED", 10_000)
    file = LogFile(tmp_path / "a", 2**20)
    answer = threading.Event()

    def slow(data: bytes) -> int:
        answer.wait(60)
        return len(data)

    with file._lock:
        real, file._file = file._file, Disk(slow)  # type: ignore[assignment]
    file.append(b"first")
    wait_for(lambda: not file._num_buffered)
    for _ in range(30):
        file.append(bytes(1000))
    assert file.has_lost and file._num_buffered <= 10_000
    assert not file.begin([b"too early"]), "the disk is still behind"
    answer.set()
    wait_for(lambda: not file._num_buffered)
    assert file.begin([b"again"]) and not file.has_lost
    file.close()
    real.close()
    assert contents(tmp_path / "a") == [b"again"]


def test_closing_does_not_wait_for_ever(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = LogFile(tmp_path / "a", 2**20)
    answer = threading.Event()
    with file._lock:
        real, file._file = file._file, Disk(lambda data: answer.wait(60) and 0)  # type: ignore[assignment]
    file.append(b"x")
    file.close(timeout=0.2)
    assert "was left unfinished: the disk does not answer" in caplog.text
    answer.set()
    file._thread.join(60)
    real.close()


class Disk:
    """A file whose writes do what a test wants."""

    def __init__(self, write: Callable[[bytes], Any]) -> None:
        self.write = write

    def flush(self) -> None:
        pass

    def tell(self) -> int:
        return 0

    def close(self) -> None:
        pass
