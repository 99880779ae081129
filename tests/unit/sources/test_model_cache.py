"""The model cache: complete or absent, one writer among processes, removal."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from infer.errors import ModelError
from infer.plugins.model_cache import CacheEntry, Filled, fetch, find_entry, list_entries, remove_entry
from infer.plugins.model_source import Progress


def ignore(_: Progress) -> None:
    return None


def filled(content: Path, text: str = "GGUF") -> Filled:
    (content / "m.gguf").write_text(text)
    return Filled(reference="pypi:a==1", identity="sha256:1", model=content / "m.gguf")


FETCHER = """
import sys, time
from pathlib import Path
from infer.plugins.model_cache import Filled, fetch
cache, log = Path(sys.argv[1]), Path(sys.argv[2])
def fill(content):
    with log.open("a") as stream:
        stream.write("filled\\n")
    time.sleep(0.2)
    (content / "m.gguf").write_text("GGUF")
    return Filled(reference="r", identity="i", model=content / "m.gguf")
print("ready", flush=True)
sys.stdin.readline()
assert fetch(cache, "k", fill, lambda _: None).path.read_text() == "GGUF"
"""


def test_one_process_fills_the_others_use_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", FETCHER, str(tmp_path / "cache"), str(log)]
    workers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for worker in workers:
        assert worker.stdout is not None and worker.stdout.readline() == "ready\n"
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    for worker in workers:
        worker.communicate(timeout=30)
    assert [worker.returncode for worker in workers] == [0, 0, 0]
    assert log.read_text() == "filled\n"


def test_a_second_thread_waits_and_says_so(tmp_path: Path) -> None:
    inside, go = threading.Event(), threading.Event()

    def slow(content: Path) -> Filled:
        inside.set()
        assert go.wait(10)
        return filled(content)

    first = threading.Thread(target=fetch, args=(tmp_path, "k", slow, ignore))
    first.start()
    assert inside.wait(10)
    assert find_entry(tmp_path, "k") is None  # not visible while it is being filled

    def on_wait(report: Progress) -> None:
        assert report.stage == "wait"
        go.set()

    entry = fetch(tmp_path, "k", lambda _: pytest.fail("filled twice"), on_wait)
    first.join()
    assert entry.path.read_text() == "GGUF"


def test_a_failed_fill_leaves_nothing(tmp_path: Path) -> None:
    def fail(content: Path) -> Filled:
        filled(content)
        raise ModelError("the network went away")

    with pytest.raises(ModelError, match="went away"):
        fetch(tmp_path, "k", fail, ignore)
    assert find_entry(tmp_path, "k") is None and list_entries(tmp_path) == []
    assert list((tmp_path / "staging").iterdir()) == []
    assert fetch(tmp_path, "k", filled, ignore).path.read_text() == "GGUF"


def test_a_partial_download_can_be_kept_for_resuming(tmp_path: Path) -> None:
    def half(content: Path) -> Filled:
        (content / "part").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(tmp_path, "k", half, ignore, keep_partial=True)
    assert find_entry(tmp_path, "k") is None

    def resume(content: Path) -> Filled:
        assert (content / "part").read_text() == "half"
        return filled(content)

    fetch(tmp_path, "k", resume, ignore, keep_partial=True)


@pytest.mark.parametrize("damage", ["truncated", "deleted", "record"])
def test_a_damaged_entry_is_filled_again(tmp_path: Path, damage: str) -> None:
    entry = fetch(tmp_path, "k", filled, ignore)
    if damage == "truncated":
        entry.path.write_text("GG")
    elif damage == "deleted":
        entry.path.unlink()
    else:
        (entry.path.parent.parent / "entry.json").write_text('{"key": 1}')
    assert find_entry(tmp_path, "k") is None
    assert fetch(tmp_path, "k", filled, ignore).path.read_text() == "GGUF"


def test_list_and_remove(tmp_path: Path) -> None:
    one = fetch(tmp_path, "one", filled, ignore)
    fetch(tmp_path, "two", filled, ignore)
    assert {entry.key for entry in list_entries(tmp_path)} == {"one", "two"}
    assert one == CacheEntry(key="one", reference="pypi:a==1", identity="sha256:1", path=one.path, size=4)
    remove_entry(tmp_path, "one")
    assert [entry.key for entry in list_entries(tmp_path)] == ["two"]
    assert not one.path.exists()
    remove_entry(tmp_path, "one")  # nothing to do is not an error


def test_a_cache_that_cannot_be_written_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the directory should be")
    with pytest.raises(ModelError, match="INFER_CACHE_DIR"):
        fetch(tmp_path / "cache", "k", filled, ignore)
