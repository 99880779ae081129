"""The store of captured rows: one kit for every backing and for the writer thread in front, and what only they promise."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from infer.engine.worker import block_store as module
from infer.engine.worker.background_store import BackgroundStore
from infer.engine.worker.block_store import (
    ArenaStore,
    BlockStoreError,
    MissingBlockError,
    private_store,
    shared_store,
)
from infer.engine.worker.directory_store import DirectoryStore, directory_store
from infer.errors import ConfigError
from infer.testing.kits import Check, block_store


class Settled:
    """A background store that answers at once."""

    def __init__(self, object_bytes: int, num_objects: int) -> None:
        self.store = BackgroundStore(private_store(object_bytes, num_objects), 2)
        self.num_objects = num_objects

    def put(
        self, objects: Mapping[bytes, bytes], retain: Sequence[bytes] = (), release: Sequence[bytes] = ()
    ) -> list[bytes]:
        self.store.put(objects, retain, release)
        self.store.read([])
        return self.store.take_refused()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def shared(object_bytes: int, num_objects: int) -> ArenaStore:
    return shared_store(object_bytes, num_objects, 2**20)


def directory(object_bytes: int, num_objects: int) -> DirectoryStore:
    return directory_store(Path(tempfile.mkdtemp()) / "store", object_bytes, num_objects)


MAKERS = {"private": private_store, "shared": shared, "directory": directory, "background": Settled}
# A wrong batch breaks a background store for good, on purpose.
CASES = [
    pytest.param(check, id=f"{name}-{check.name}")
    for name, make in MAKERS.items()
    for check in block_store.checks(make)
    if (name, check.name) != ("background", "atomic")
]


@pytest.mark.parametrize("check", CASES)
def test_kit(check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    check.run()


@pytest.mark.parametrize("mistake", ["evicts retained", "grows", "reads in part", "aliases", "forgets references"])
def test_the_kit_finds_mistakes(mistake: str) -> None:
    class Wrong(ArenaStore):
        def put(
            self, objects: Mapping[bytes, bytes], retain: Sequence[bytes] = (), release: Sequence[bytes] = ()
        ) -> list[bytes]:
            if mistake == "evicts retained":
                retain, release = (), ()
            return super().put(objects, retain, release)

        def read(self, keys: Sequence[bytes]) -> Any:
            if mistake == "reads in part":
                return [super(Wrong, self).read([key])[0] for key in keys if key in self._slots]
            if mistake == "aliases":
                view = memoryview(bytearray(4)) if self._closed else memoryview(self._memory)
                super().read(keys)
                return [view[self._slots[key] * 4 : self._slots[key] * 4 + 4] for key in keys]
            return super().read(keys)

        def discard(self, keys: Sequence[bytes]) -> None:
            super().discard(keys)
            if mistake == "forgets references":
                for key in keys:
                    self._references.pop(key, None)

    def make(object_bytes: int, num_objects: int) -> ArenaStore:
        made = private_store(object_bytes, num_objects + (mistake == "grows"))
        return Wrong(made._memory, object_bytes, made.num_objects)

    failed = []
    for check in block_store.checks(make):
        try:
            check.run()
        except Exception:
            failed.append(check.name)
    assert failed


def test_work_is_proportional_to_what_is_evicted() -> None:
    """100 evictions take the same number of executed lines beside 900 retained objects as alone."""

    def lines(num_retained: int) -> int:
        store = private_store(1, num_retained + 100)
        kept = {b"kept%d" % i: b"k" for i in range(num_retained)}
        store.put(kept, retain=list(kept))
        store.put({b"idle%d" % i: b"i" for i in range(100)})
        count = 0

        def trace(frame: Any, event: str, _: object) -> Any:
            nonlocal count
            if frame.f_code.co_filename == module.__file__:
                count += event == "line"
                return trace
            return None

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            refused = store.put({b"new%d" % i: b"n" for i in range(100)})
        finally:
            sys.settrace(before)
        assert refused == []
        store.close()
        return count

    assert lines(900) == lines(0) > 100


def test_one_warning_however_often_there_is_no_room(caplog: pytest.LogCaptureFixture) -> None:
    store = private_store(1, 1)
    store.put({b"a": b"a"}, retain=[b"a"])
    for name in (b"b", b"c"):
        assert store.put({name: b"x"}) == [name]
    assert len(caplog.records) == 1 and "capture.max_bytes" in caplog.text


def test_a_missing_block_is_named() -> None:
    with pytest.raises(MissingBlockError, match="beef") as caught:
        private_store(1, 1).read([b"\xbe\xef"])
    assert caught.value.key == b"\xbe\xef"


# -- shared memory ---------------------------------------------------------------------------------------------------


@pytest.mark.row("X-AUX", "RE-28: more shared memory than is free is refused before it is touched")
def test_shared_memory_is_refused_when_it_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"takes 4\.0 GiB and 1\.0 MiB are free") as caught:
        shared_store(2**20, 2**12, 2**20)
    assert "capture.max_bytes" in caught.value.fields

    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    before = set(Path("/proc/self/fd").iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(ConfigError, match="No space left"):
            shared(4, 4)
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(ConfigError, match="memfd_create"):
        shared(4, 4)
    assert len(set(Path("/proc/self/fd").iterdir()) - before) <= 1, "a descriptor was left open"


def test_shared_memory_has_no_name_and_dies_with_its_process() -> None:
    """Killed without a chance to clean up."""
    code = (
        "import os, sys; from infer.engine.worker.block_store import shared_store; s = shared_store(4096, 64, 2**20);"
        "s.put({b'k': b'x' * 4096}); print('memfd' in open('/proc/self/maps').read(), flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdin is not None
    assert child.stdout.readline() == "True\n"
    assert not list(Path("/dev/shm").glob("*infer*"))
    child.kill()
    child.wait(30)
    child.stdout.close()
    child.stdin.close()
    assert not list(Path("/dev/shm").glob("*infer*"))


# -- background ------------------------------------------------------------------------------------------------------


class Gate:
    """A store whose puts wait for permission."""

    object_bytes, num_objects = 1, 8

    def __init__(self) -> None:
        self.store = private_store(1, 8)
        self.open = threading.Event()
        self.put_threads: set[str] = set()

    def put(self, objects: Any, retain: Any = (), release: Any = ()) -> list[bytes]:
        self.open.wait(60)
        self.put_threads.add(threading.current_thread().name)
        if b"bad" in objects:
            raise ValueError("planted")
        return self.store.put(objects, retain, release)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def test_a_read_sees_what_was_put_before_and_a_full_queue_blocks_the_producer() -> None:
    gate = Gate()
    background = BackgroundStore(gate, 2)
    third = threading.Event()

    def produce() -> None:
        for name in (b"a", b"b", b"c", b"d"):  # one at the writer, two in the queue, one that has to wait
            background.put({name: name})
        third.set()

    producer = threading.Thread(target=produce)
    producer.start()
    assert not third.wait(0.2)
    gate.open.set()
    assert third.wait(60)
    producer.join()
    assert background.read([b"a", b"b", b"c", b"d"]) == [b"a", b"b", b"c", b"d"]
    assert gate.put_threads == {"infer-rows"}
    background.close()


def test_the_first_error_is_kept_and_raised_and_nobody_waits_for_ever() -> None:
    gate = Gate()
    background = BackgroundStore(gate, 1)
    background.put({b"bad": b"x"})
    gate.open.set()
    for call in (lambda: background.read([b"a"]), lambda: background.put({b"a": b"a"}), lambda: background.read([])):
        with pytest.raises(BlockStoreError, match="broke: planted") as caught:
            call()
        assert isinstance(caught.value.__cause__, ValueError)
    background.close()


def test_close_finishes_what_was_put_and_leaves_no_thread() -> None:
    """And a store that nobody used never had one."""
    before = threading.active_count()
    BackgroundStore(private_store(1, 1), 1).close()
    gate = Gate()
    background = BackgroundStore(gate, 4)
    background.put({b"a": b"a"})
    assert threading.active_count() == before + 1
    gate.open.set()
    background.close()
    assert gate.put_threads == {"infer-rows"}
    assert threading.active_count() == before
    with pytest.raises(BlockStoreError, match="closed"):
        background.put({b"a": b"a"})


def test_what_is_retained_finds_room_beside_what_is_not() -> None:
    """The scheduler counts on it: it never asks for more than fits, and what it asked for is there."""
    store = private_store(1, 2)
    assert store.put({b"a": b"1", b"b": b"2"}) == []
    assert store.put({b"a": b"3", b"b": b"4", b"c": b"5", b"d": b"6"}, [b"c", b"d"]) == [b"a", b"b"]
    assert store.read([b"c", b"d"]) == [b"5", b"6"]
