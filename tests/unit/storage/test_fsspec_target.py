"""Managed targets: atomic create-only files that never leave their root, memory with a cap, S3 against a small server."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import anyio
import fsspec
import pytest

from infer.errors import StorageError
from infer.storage import _s3
from infer.storage.fsspec_target import FsspecTarget, create
from put_server import PutServer, answer, put_server, reached, silent, status, store_and_drop

pytestmark = pytest.mark.anyio
DATA = bytes(range(256)) * 700


def local(root: Path, key: str = "runs/a/object.dynexp") -> FsspecTarget:
    return create(f"file://{root}/{key}", {"root": f"file://{root}"})


def memory(name: str, key: str = "k", **options: Any) -> FsspecTarget:
    return create(f"memory://{name}/{key}", {"root": f"memory://{name}", "storage_options": options})


def s3(server: PutServer, key: str = "runs/k", seconds: float = 60, **options: Any) -> FsspecTarget:
    storage = {
        "key": "access",
        "secret": "SECRET",
        "endpoint_url": f"http://{server.authority}",
        "client_kwargs": {"region_name": "us-east-1"},
    }
    root = "s3://bucket/base"
    return create(f"{root}/{key}", {"root": root, "storage_options": storage | options, "timeout_seconds": seconds})


async def failure(made: FsspecTarget, data: bytes = DATA) -> str:
    with pytest.raises(StorageError) as caught:
        await made.put(data, if_absent=True)
    error = caught.value
    assert error.__cause__ is None and "SECRET" not in str(error) and "bucket" not in str(error)
    await made.aclose()
    return error.code


class TestLocal:
    async def test_the_file_is_whole_and_nothing_else_is_left(self, tmp_path: Path) -> None:
        await local(tmp_path).put(DATA, if_absent=True)
        folder = tmp_path / "runs" / "a"
        assert [path.name for path in folder.iterdir()] == ["object.dynexp"]
        assert (folder / "object.dynexp").read_bytes() == DATA

    async def test_a_second_write_changes_nothing(self, tmp_path: Path) -> None:
        await local(tmp_path).put(DATA, if_absent=True)
        assert await failure(local(tmp_path), b"other") == "artifact_conflict"
        assert await local(tmp_path).get() == DATA
        assert len(list((tmp_path / "runs" / "a").iterdir())) == 1

    async def test_of_sixteen_writers_one_wins(self, tmp_path: Path) -> None:
        """BR-13."""
        results: list[str] = []

        async def write(number: int) -> None:
            try:
                await local(tmp_path).put(bytes([number]) * 1000, if_absent=True)
                results.append(f"won {number}")
            except StorageError as error:
                results.append(error.code)

        async with anyio.create_task_group() as tasks:
            for number in range(16):
                tasks.start_soon(write, number)
        assert sorted(results)[:15] == ["artifact_conflict"] * 15
        content = await local(tmp_path).get()
        assert f"won {content[0]}" in results and content == content[:1] * 1000

    @pytest.mark.parametrize("kind", ["folder", "file", "dangling"])
    async def test_links_inside_the_root_are_not_followed(self, tmp_path: Path, kind: str) -> None:
        """BR-13: neither a folder nor the object itself may be a link out."""
        outside, root = tmp_path / "outside", tmp_path / "root"
        outside.mkdir()
        (root / "runs").mkdir(parents=True)
        if kind == "folder":
            (root / "runs" / "a").symlink_to(outside)
        else:
            (root / "runs" / "a").mkdir()
            victim = outside / "victim"
            if kind == "file":
                victim.write_bytes(b"precious")
            (root / "runs" / "a" / "object.dynexp").symlink_to(victim)
        code = await failure(local(root))
        assert code == ("artifact_upload_rejected" if kind == "folder" else "artifact_conflict")
        assert [path.read_bytes() for path in outside.iterdir()] == ([b"precious"] if kind == "file" else [])

    async def test_a_link_cannot_be_read(self, tmp_path: Path) -> None:
        (tmp_path / "k").symlink_to("/etc/hostname")
        with pytest.raises(StorageError):
            await local(tmp_path, "k").get()

    async def test_a_file_in_the_way(self, tmp_path: Path) -> None:
        (tmp_path / "runs").write_bytes(b"")
        assert await failure(local(tmp_path)) == "artifact_upload_rejected"

    @pytest.mark.parametrize("key", ["../k", "a/../../k", "a//k", "./k", ""])
    def test_keys_that_leave_the_root(self, tmp_path: Path, key: str) -> None:
        with pytest.raises(StorageError) as caught:
            local(tmp_path / "root", key)
        assert caught.value.code == "artifact_target_rejected"

    def test_a_relative_root(self) -> None:
        with pytest.raises(StorageError):
            create("file://relative/k", {"root": "file://relative"})

    def test_a_full_disk_leaves_nothing(self, tmp_path: Path) -> None:
        """A file size limit fails a write in the middle, as a full disk does."""
        code = """
import anyio, resource, sys
from infer.errors import StorageError
from infer.storage.fsspec_target import create
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
made = create(f"file://{sys.argv[1]}/a/k", {"root": f"file://{sys.argv[1]}"})
async def main():
    try:
        await made.put(bytes(300_000), if_absent=True)
    except StorageError as error:
        print(error.code, error.retryable)
anyio.run(main)
"""
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["artifact_upload_rejected", "True"]
        assert list((tmp_path / "a").iterdir()) == []

    async def test_a_killed_writer_leaves_no_object(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Until the link is made nothing has the object's name."""
        seen: list[list[str]] = []
        link = os.link

        def watch(*arguments: Any, **options: Any) -> None:
            seen.append([path.name for path in (tmp_path / "runs" / "a").iterdir()])
            link(*arguments, **options)

        monkeypatch.setattr(os, "link", watch)
        await local(tmp_path).put(DATA, if_absent=True)
        assert len(seen) == 1 and [name[:9] for name in seen[0]] == [".partial-"]


class TestMemory:
    async def test_readable_by_fsspec_in_the_same_process(self) -> None:
        await memory("unit-shared", "a/b").put(DATA, if_absent=True)
        with fsspec.open("memory://unit-shared/a/b", "rb") as file:
            assert file.read() == DATA
        assert await failure(memory("unit-shared", "a/b"), b"other") == "artifact_conflict"
        await memory("unit-shared", "a/b").delete()

    async def test_the_cap_is_over_everything_below_the_root(self) -> None:
        first, second = (memory("unit-cap", key, max_bytes=1000) for key in "ab")
        await first.put(bytes(600), if_absent=True)
        assert await failure(second, bytes(401)) == "artifact_upload_rejected"
        assert not await second.exists()
        await second.put(bytes(400), if_absent=True)
        for made in (first, second):
            await made.delete()


class TestS3:
    """s3fs works on asyncio only, so trio is where it could fail; making a botocore client is slow."""

    @pytest.fixture
    def anyio_backend(self) -> str:
        return "trio"

    async def test_one_put_object_with_if_none_match(self) -> None:
        """T38, T39: the contract with s3fs."""
        with put_server() as server:
            made = s3(server)
            await made.put(bytes(1_000_000), if_absent=True)
            await made.aclose()
            (exchange,) = server.exchanges
            assert exchange.request_line == "PUT /bucket/base/runs/k HTTP/1.1"
            assert exchange.headers["If-None-Match"] == "*"
            assert exchange.body == bytes(1_000_000)

    async def test_an_existing_object(self) -> None:
        with put_server() as server:
            first = s3(server)
            await first.put(DATA, if_absent=True)
            await first.aclose()
            assert await failure(s3(server), b"other") == "artifact_conflict"
            assert await failure(s3(server), DATA) == "artifact_conflict", "equal bytes of another writer are not ours"
            assert server.objects == {"/bucket/base/runs/k": DATA}

    async def test_stored_but_the_answer_is_lost(self) -> None:
        """BR-11: an authorised read proves the write."""
        with put_server(store_and_drop) as server:
            made = s3(server)
            await made.put(DATA, if_absent=True)
            await made.aclose()
            assert server.objects == {"/bucket/base/runs/k": DATA}

    async def test_stored_by_someone_else_while_the_answer_was_lost(self) -> None:
        def other(exchange: Any) -> None:
            exchange.body = b"other"
            exchange.head = exchange.head.replace(b"x-amz-meta-infer-delivery: ", b"x-amz-meta-infer-delivery: f")
            exchange.create()

        with put_server(other) as server:
            assert await failure(s3(server)) == "artifact_conflict"

    async def test_the_answer_is_lost_and_nothing_can_be_read(self) -> None:
        forbidden = answer(status(403, "connection: close"))
        quick = {"config_kwargs": {"retries": {"max_attempts": 0, "mode": "standard"}}}
        # aiohttp repeats the PUT once by itself
        with put_server(store_and_drop, store_and_drop, *[forbidden] * 8) as server:
            assert await failure(s3(server, **quick)) == "artifact_outcome_unknown"

    async def test_a_write_that_met_another_one_is_tried_again(self) -> None:
        """S3 answers 409 to a conditional write while it decides another one of the same key."""
        conflict = answer(status(409, "connection: close"))
        with put_server(conflict, conflict) as server:
            made = s3(server)
            await made.put(DATA, if_absent=True)
            await made.aclose()
            assert server.objects == {"/bucket/base/runs/k": DATA} and len(server.exchanges) == 3
        with put_server(conflict) as server:
            server.objects["/bucket/base/runs/k"] = b"other"
            server.metadata["/bucket/base/runs/k"] = {}
            assert await failure(s3(server)) == "artifact_conflict"
        with put_server(*[conflict] * 9) as server:
            assert await failure(s3(server)) == "artifact_upload_rejected"

    @pytest.mark.parametrize("code", [400, 403, 404])
    async def test_refusals(self, code: int) -> None:
        with put_server(answer(status(code, "connection: close"))) as server:
            assert await failure(s3(server)) == "artifact_upload_rejected"

    async def test_nobody_listens(self) -> None:
        with put_server() as server:
            made = s3(server, config_kwargs={"retries": {"max_attempts": 0, "mode": "standard"}})
        assert await failure(made) == "artifact_delivery_failed"

    async def test_a_silent_server_is_left_at_the_deadline(self) -> None:
        """T41: and closing is bounded too."""
        with put_server(silent) as server:
            begun = time.monotonic()
            assert await failure(s3(server, seconds=0.8)) == "artifact_outcome_unknown"
            assert time.monotonic() - begun < 30

    async def test_set_up_runs_inside_the_deadline(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """T40."""
        release = threading.Event()
        monkeypatch.setattr(_s3.fsspec, "filesystem", lambda *_, **__: release.wait(20))
        with put_server() as server:
            assert await failure(s3(server, seconds=0.2)) == "artifact_upload_timeout"
        release.set()

    async def test_two_overlapping_writes_share_no_client(self) -> None:
        """BR-01: the fast one ends and closes while the slow one waits."""
        fast_is_done = threading.Event()

        def slow(exchange: Any) -> None:
            fast_is_done.wait(10)
            exchange.create()
            exchange.socket.sendall(status(200))

        async def write(made: FsspecTarget) -> None:
            await made.put(DATA, if_absent=True)
            await made.aclose()

        with put_server(slow) as server:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(write, s3(server, "slow"))
                await reached(server)
                await write(s3(server, "fast"))
                fast_is_done.set()
            assert sorted(server.objects) == ["/bucket/base/fast", "/bucket/base/slow"]

    async def test_the_operators_client_settings_win(self) -> None:
        """M12."""
        with put_server() as server:
            made = s3(server, seconds=30, config_kwargs={"connect_timeout": 3})
            chosen = made._object._options["config_kwargs"]  # type: ignore[attr-defined]
        assert chosen == {
            "connect_timeout": 3,
            "read_timeout": 30,
            "retries": {"max_attempts": 2, "mode": "standard"},
        }

    async def test_a_filesystem_that_poses_as_s3_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """BR-15."""

        class Poser(fsspec.AbstractFileSystem):  # type: ignore[misc]
            protocol = ("s3", "s3a")

            def pipe_file(self, *_: Any, **__: Any) -> None:
                raise AssertionError("written")

        monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, "s3", Poser)
        with put_server() as server:
            assert await failure(s3(server)) == "artifact_upload_rejected"


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_s3_on_asyncio(anyio_backend: str) -> None:
    with put_server() as server:
        made = s3(server)
        await made.put(DATA, if_absent=True)
        assert await made.get() == DATA
        await made.aclose()


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_s3_stores_any_size_in_one_request(anyio_backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload in parts is not created atomically; version 2 of the artifact has no limit of 64 MiB."""
    monkeypatch.setattr(_s3, "CHUNK", 16)
    data = DATA * 16
    assert len(data) > 2 * _s3.CHUNK
    with put_server() as server:
        made = s3(server)
        await made.put(data, if_absent=True)
        assert list(server.objects.values()) == [data]
        await made.aclose()


@pytest.mark.parametrize("uri", ["http://a/b", "s3fs://a/b", "k", "ftp://a/b", "://a"])
def test_other_schemes(uri: str) -> None:
    with pytest.raises(StorageError) as caught:
        create(uri, {})
    assert caught.value.code == "artifact_target_rejected"


def test_an_object_outside_its_root() -> None:
    with pytest.raises(StorageError):
        create("memory://elsewhere/k", {"root": "memory://here"})


def test_loading_the_targets_loads_neither_s3fs_nor_numpy() -> None:
    code = """
import sys
import infer.storage.fsspec_target, infer.storage.presigned_put
print(sorted({"s3fs", "numpy", "torch", "aiohttp"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
