"""The store in files: what other processes see of it, what a killed writer leaves, and who may write."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infer.engine.worker.block_store import MissingBlockError
from infer.engine.worker.directory_store import directory_store
from infer.errors import ConfigError

SIZE = 64 * 1024


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()} - {"lock"}


def test_files_are_the_users_alone(tmp_path: Path) -> None:
    made = tmp_path / "new" / "store"
    store = directory_store(made, 2, 2)
    store.put({b"a": b"aa"})
    assert [oct(path.stat().st_mode & 0o777) for path in (made.parent, made, made / "61.rows", made / "lock")] == [
        *("0o700", "0o700", "0o600", "0o600")
    ]
    store.close()


@pytest.mark.row("X-AUX-KEYS", "after kill -9 of the writer the directory holds complete objects only")
def test_a_killed_writer_leaves_whole_objects(tmp_path: Path) -> None:
    """Killed somewhere in the middle of endless writes, most of them over objects that are there."""
    code = (
        "import sys; from pathlib import Path; from infer.engine.worker.directory_store import directory_store\n"
        f"store = directory_store(Path(sys.argv[1]), {SIZE}, 8); n = 0\n"
        "while True:\n"
        f"    n += 1; store.put({{bytes([n % 11]): bytes([n % 251]) * {SIZE}}})\n"
        "    if n == 100: print('busy', flush=True)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "busy\n"
    reads = 0
    for _ in range(200):  # while it writes
        for path in tmp_path.glob("*.rows"):
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                continue
            assert data == data[:1] * SIZE
            reads += 1
    child.send_signal(signal.SIGKILL)
    child.wait(30)
    child.stdout.close()
    assert reads > 0
    left = sorted(tmp_path.glob("*.rows"))
    assert 7 <= len(left) <= 8
    for path in left:
        data = path.read_bytes()
        assert data == data[:1] * SIZE
    again = directory_store(tmp_path, SIZE, 8)  # its lock died with it
    keys = [bytes.fromhex(path.stem) for path in left]
    assert again.read(keys) == [path.read_bytes() for path in left]
    assert names(tmp_path) == {path.name for path in left}, "what was unfinished is gone"
    again.close()


def test_objects_of_an_earlier_run_stay_until_their_room_is_needed(tmp_path: Path) -> None:
    first = directory_store(tmp_path, 1, 3)
    for at, key in enumerate((b"a", b"b", b"c")):
        first.put({key: key}, retain=[key])
        os.utime(tmp_path / f"{key.hex()}.rows", ns=(at, at))
    first.close()
    (tmp_path / "dd.tmp").write_bytes(b"d")
    (tmp_path / "ee.rows").write_bytes(b"too long")
    (tmp_path / "readme").write_text("whoever's")
    second = directory_store(tmp_path, 1, 3)
    assert names(tmp_path) == {"61.rows", "62.rows", "63.rows", "readme"}
    assert second.put({b"x": b"x"}) == []
    assert names(tmp_path) == {"62.rows", "63.rows", "78.rows", "readme"}, "the oldest goes first"
    second.close()
    smaller = directory_store(tmp_path, 1, 1)
    assert names(tmp_path) == {"78.rows", "readme"}, "never more than the cap"
    smaller.close()


def test_one_engine_writes(tmp_path: Path) -> None:
    store = directory_store(tmp_path, 1, 1)
    with pytest.raises(ConfigError, match="another engine writes there") as caught:
        directory_store(tmp_path, 1, 1)
    assert caught.value.fields == ("capture.store_dir",)
    store.close()
    directory_store(tmp_path, 1, 1).close()


def test_what_cannot_be_used_is_refused_when_the_store_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="name a directory that can be written"):
        directory_store(tmp_path / "file" / "below", 1, 1)
    (tmp_path / "mine.rows").write_text("precious")
    with pytest.raises(ConfigError, match="what is there cannot be used"):
        directory_store(tmp_path, 1, 1)
    assert (tmp_path / "mine.rows").read_text() == "precious"
    (tmp_path / "mine.rows").unlink()

    class Usage:
        free = 3

    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage)
    with pytest.raises(ConfigError, match="takes 4 B more and 3 B are free") as caught:
        directory_store(tmp_path, 2, 2)
    assert "capture.max_bytes" in caught.value.fields
    directory_store(tmp_path, 1, 3).close()


def test_a_full_disk_refuses_the_object_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = directory_store(tmp_path, 2, 2)
    store.put({b"a": b"aa", b"b": b"bb"}, retain=[b"a"])
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:1]))
        assert store.put({b"b": b"22", b"c": b"cc"}, retain=[b"c"]) == [b"c", b"b"]

        def full(*args: Any) -> int:
            raise OSError(28, "No space left on device")

        patch.setattr(os, "write", full)
        assert store.put({b"c": b"cc"}) == [b"c"]
    assert caplog.text.count("cannot be written") == 1 and len(caplog.records) == 1
    assert names(tmp_path) == {"61.rows"}
    assert store.read([b"a"]) == [b"aa"]
    assert store.put({b"c": b"cc"}) == []
    assert store.read([b"c"]) == [b"cc"]
    store.close()


def test_a_file_that_somebody_removed_or_cut_is_a_missing_object(tmp_path: Path) -> None:
    store = directory_store(tmp_path, 2, 2)
    for damage in (Path.unlink, lambda path: path.write_bytes(b"x")):
        store.put({b"a": b"aa"}, retain=[b"a"])
        damage(tmp_path / "61.rows")
        with pytest.raises(MissingBlockError, match="who changes") as caught:
            store.read([b"a"])
        assert caught.value.key == b"a"
    store.put({b"a": b"AA"})
    assert store.read([b"a"]) == [b"AA"]
    store.close()


def _flip(path: Path) -> None:
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "inside").touch()


def _link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _other_file(path: Path) -> None:
    other = path.with_name("other")
    path.rename(other)
    path.symlink_to(other)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("change", [_flip, _folder, _link, _other_file, _pipe])
def test_what_is_not_the_object_is_a_missing_object(tmp_path: Path, change: Callable[[Path], None]) -> None:
    """Neither bytes that changed, nor what else can have that name, is handed out, waited for or in the way of the rest."""
    store = directory_store(tmp_path, 2, 2)
    store.put({b"a": b"aa", b"b": b"bb"})
    change(tmp_path / "61.rows")
    with pytest.raises(MissingBlockError) as missing:
        store.read([b"b", b"a"])
    assert missing.value.key == b"a"
    assert store.read([b"b"]) == [b"bb"]
    store.put({b"c": b"cc"})
    assert store.read([b"c", b"b"]) == [b"cc", b"bb"]
    store.close()
