"""The store in files: whole values or none, a budget, the oldest go, and what is in the way."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from infer.connectors.directory import ABANDONED, DirectoryStore, open_store
from infer.errors import ConfigError


def key(number: int, space: str = "a") -> str:
    return f"{space * 16}-{number:064x}-0"


def size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def test_values_come_back_and_two_stores_share_them(tmp_path: Path) -> None:
    first, second = DirectoryStore(tmp_path, 10**6), DirectoryStore(tmp_path, 10**6)
    first.put({key(1): b"one", key(2): b""})
    assert second.contains([key(1), key(3), key(2)]) == [True, False, True]
    assert second.get([key(3), key(2), key(1)]) == [None, b"", b"one"]
    second.put({key(1): b"other"})
    assert first.get([key(1)]) == [b"other"]
    first.close()


def test_the_budget_is_never_exceeded_and_what_was_read_stays(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path, 1000)
    for number in range(9):
        store.put({key(number): bytes(100)})
        os.utime(store._path(key(number)), (number, number))
    assert store.get([key(0)]) == [bytes(100)]  # reading makes it young
    for number in range(9, 40):
        store.put({key(number): bytes(100)})
        assert size(tmp_path) <= 1000
        assert store.contains([key(0)]) == [True] or number > 12
    assert store.contains([key(1), key(39)]) == [False, True]
    store.put({key(99): bytes(1001)})  # does not fit at all
    assert store.contains([key(99)]) == [False]


def test_what_others_wrote_counts(tmp_path: Path) -> None:
    mine, other = DirectoryStore(tmp_path, 1000), DirectoryStore(tmp_path, 10**6)
    mine.put({key(0): bytes(100)})
    other.put({key(number, "b"): bytes(100) for number in range(20)})
    mine.put({key(1): bytes(100)})
    mine.put({key(2): bytes(100)})
    assert size(tmp_path) <= 1000
    assert mine.contains([key(2)]) == [True]


def test_unfinished_files_are_no_values_and_go_in_the_end(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path, 1000)
    store.put({key(1): b"1"})
    left = store._path(key(1)).with_name("00.partial")
    fresh = left.with_name("01.partial")
    left.write_bytes(b"x" * 5000)
    fresh.write_bytes(b"y")
    os.utime(left, (time.time() - ABANDONED - 1,) * 2)
    DirectoryStore(tmp_path, 1000).put({key(2): b"2"})
    assert not left.exists() and fresh.exists()
    assert store.contains([key(1), key(2)]) == [True, True]


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DirectoryStore(tmp_path, 1000)

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        store.put({key(1): b"1"})
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "kv", 1000)
    store.put({key(1): b"1"})
    (tmp_path / "secret").write_bytes(b"secret")
    path = store._path(key(1))
    path.unlink()
    path.symlink_to(tmp_path / "secret")
    with pytest.raises(OSError):
        store.get([key(1)])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "needs path"),
        ({"path": "relative"}, "an absolute directory, not 'relative'"),
        ({"path": 7}, "not 7"),
        ({"path": "{tmp}/file/below"}, "name a directory that can be written"),
        ({"path": "{tmp}", "max_bytes": 0}, "max_bytes=0"),
        ({"path": "{tmp}", "max_bytes": "1 elephant"}, "max_bytes='1 elephant'"),
        ({"path": "{tmp}", "max_bytes": None}, "max_bytes=None"),
        ({"path": "{tmp}", "bytes": 1}, "has no option 'bytes'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "none",
)
def test_wrong_options_are_refused(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    given = {k: v.replace("{tmp}", str(tmp_path)) if isinstance(v, str) else v for k, v in options.items()}
    with pytest.raises(ConfigError, match=words) as caught:
        open_store(given)
    assert caught.value.fields == ("kv_connector.options",)


def test_a_size_may_be_in_words(tmp_path: Path) -> None:
    assert open_store({"path": str(tmp_path / "new" / "kv"), "max_bytes": "2KiB"})._max_bytes == 2048
