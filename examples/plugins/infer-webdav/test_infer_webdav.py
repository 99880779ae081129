"""The plugin against the kit, with a real server whose disk fails, and what a server and an operator can do wrong."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import infer_webdav
import pytest
from infer_webdav import WebDAVTarget
from webdav_server import PASSWORD, USER, WebDAVServer

from infer import StorageError
from infer.plugins import StorageTargetSpec
from infer.testing.kits import Check, storage_target
from infer.testing.storage_faults import disk

(SPEC,) = infer_webdav.infer_storage_targets()
OPTIONS: dict[str, Any] = {"storage_options": {"username": USER, "password": PASSWORD}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("webdav")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[WebDAVServer]:
    running = WebDAVServer(folder)
    yield running
    running.stop()


def checks(spec: StorageTargetSpec, directory: Path) -> dict[str, Check]:
    return {check.name: check for check in storage_target.checks(spec, directory, disk)}


@pytest.mark.parametrize("name", list(checks(SPEC, Path("/unused"))))
def test_conforms(server: WebDAVServer, folder: Path, name: str) -> None:
    """`{tmp}` is a path on the server here, another for every check."""
    spec = dataclasses.replace(SPEC, example={"uri": server.uri + "{tmp}/", "options": OPTIONS})
    checks(spec, Path(f"/{name}"))[name].run()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_one_writer_wins_at_a_server_that_looks_first_and_moves_later(
    server: WebDAVServer, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    move = shutil.move

    def slowly(source: str, destination: str) -> Any:
        time.sleep(0.05)
        return move(source, destination)

    monkeypatch.setattr(shutil, "move", slowly)  # wsgidav calls it when it has seen that the name is free
    spec = dataclasses.replace(SPEC, example={"uri": server.uri + "{tmp}/", "options": OPTIONS})
    checks(spec, Path(f"/slow-{backend}"))[f"one_winner[{backend}]"].run()


def put(uri: str, options: dict[str, Any], data: bytes = b"data", *, if_absent: bool = True) -> None:
    async def run() -> None:
        target = WebDAVTarget(uri, options)
        try:
            await target.put(data, if_absent=if_absent)
        finally:
            await target.aclose()

    anyio.run(run)


def test_an_object_is_a_file_with_the_name_as_it_is_written(server: WebDAVServer, folder: Path) -> None:
    uri = f"{server.uri}/names/50% of #1 %41 ä+b.bin"
    put(uri, OPTIONS)
    assert (folder / "names" / "50% of #1 %41 ä+b.bin").read_bytes() == b"data"
    assert list((folder / "names" / infer_webdav.UPLOADS).iterdir()) == []
    assert anyio.run(WebDAVTarget(uri, OPTIONS).list) == [uri]


def test_nothing_is_left_of_an_upload_that_the_disk_could_not_hold(server: WebDAVServer, folder: Path) -> None:
    with disk("partial"), pytest.raises(StorageError) as caught:
        put(f"{server.uri}/full/object", OPTIONS, b"x" * 200_000)
    assert caught.value.retryable
    assert [path for path in (folder / "full").rglob("*") if path.is_file()] == []


def test_a_conflict_is_told_apart(server: WebDAVServer) -> None:
    put(f"{server.uri}/taken", OPTIONS)
    with pytest.raises(StorageError) as caught:
        put(f"{server.uri}/taken", OPTIONS)
    assert (caught.value.code, caught.value.retryable) == ("artifact_conflict", False)


def test_a_wrong_password_is_refused_without_showing_it(server: WebDAVServer) -> None:
    wrong = {"storage_options": {"username": USER, "password": "hunter2"}}
    with pytest.raises(StorageError, match="username and password") as caught:
        put(f"{server.uri}/x", wrong)
    assert not caught.value.retryable and "hunter2" not in f"{caught.value!r}{WebDAVTarget(server.uri + '/x', wrong)!r}"


def test_a_server_that_is_away_is_worth_another_try(tmp_path: Path) -> None:
    gone = WebDAVServer(tmp_path)
    gone.stop()
    with pytest.raises(StorageError, match="cannot be reached") as caught:
        put(f"{gone.uri}/x", OPTIONS)
    assert caught.value.retryable and str(gone.port) not in str(caught.value)


def test_a_server_that_does_not_answer_is_given_up_in_time() -> None:
    async def run() -> None:
        async with await anyio.create_tcp_listener(local_host="127.0.0.1") as silent:  # nobody accepts
            port = silent.listeners[0].extra(anyio.abc.SocketAttribute.local_port)
            await WebDAVTarget(f"dav://127.0.0.1:{port}/x", {"timeout_seconds": 0.2}).exists()

    with pytest.raises(StorageError, match=r"in time|broke off") as caught:
        anyio.run(run)
    assert caught.value.retryable


@pytest.mark.parametrize(
    "uri",
    [
        "http://host/x",
        "dav://host",
        "dav:///x",
        "dav://host:x/x",
        "dav://host/",
        "dav://host/a/../x",
        "dav://host/a//x",
        "dav://host/a\r\nb",
        "dav://host/a?b",
        "dav://host/a;b",
        "dav://name:secret@host/x",
        "davs://host/.infer-uploads/x",
    ],
    ids=repr,
)
def test_a_wrong_url_is_rejected_without_a_secret(uri: str) -> None:
    with pytest.raises(StorageError) as caught:
        WebDAVTarget(uri, {})
    assert caught.value.code == "artifact_target_rejected" and "secret" not in str(caught.value)


def test_wrong_options_are_rejected() -> None:
    with pytest.raises(StorageError, match="has no 'user'"):
        WebDAVTarget("davs://host/x", {"storage_options": {"user": "x"}})
    with pytest.raises(StorageError, match="are text"):
        WebDAVTarget("davs://host/x", {"storage_options": {"username": "x", "password": None}})
    with pytest.raises(StorageError, match="in the clear"):
        WebDAVTarget("dav://host/x", OPTIONS)
