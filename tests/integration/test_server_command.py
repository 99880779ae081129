"""`infer serve` as a process of its own: it says where it listens, and stops as signals ask. The engine is scripted."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx2
import pytest

from api_server import events
from infer.cli.app import main
from put_server import PutServer, put_server, silent

SERVE = """
import sys
from infer.cli.app import main
from infer.cli.session import Session
from infer.testing.fake_engine import fake_engine

def make_engine(config, on_progress):
    return fake_engine(lambda token_ids, sampling: 97, config, latency=0.05)

sys.exit(main(["serve", "--cache.num-blocks", "512", *sys.argv[1:]], Session(make_engine=make_engine)))
"""


@contextmanager
def served(*arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("serving on "), line + (process.stderr.read() if process.stderr else "")
        yield process, line.split()[-1]
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def stream_in_background(address: str, max_tokens: int) -> tuple[threading.Thread, list[str], threading.Event]:
    lines: list[str] = []
    begun = threading.Event()

    def read() -> None:
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": max_tokens}
        with httpx2.stream("POST", f"{address}/v1/chat/completions", json=body, timeout=60) as reply:
            for line in reply.iter_lines():
                lines.append(line)
                if '"content":"a"' in line:
                    begun.set()

    thread = threading.Thread(target=read)
    thread.start()
    return thread, lines, begun


def told(lines: list[str]) -> list[Any]:
    data = events("\n".join(lines))
    assert data[-1] == "[DONE]"
    return [json.loads(event) for event in data[:-1]]


def test_it_says_where_it_listens_and_a_signal_lets_requests_finish() -> None:
    with served("--port", "0") as (process, address):
        thread, lines, begun = stream_in_background(address, 40)
        assert begun.wait(30)
        process.send_signal(signal.SIGTERM)
        thread.join(60)
        assert process.wait(30) == 0
    chunks = told(lines)
    assert sum("content" in c["choices"][0]["delta"] for c in chunks) >= 40
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_a_second_signal_ends_it_at_once() -> None:
    with served("--port", "0") as (process, address):
        thread, lines, begun = stream_in_background(address, 1500)
        assert begun.wait(30)
        process.send_signal(signal.SIGINT)
        with httpx2.Client(base_url=address) as client:  # the first one is in force
            while client.get("/ready").status_code == 200:
                pass
        process.send_signal(signal.SIGINT)
        thread.join(30)
        assert process.wait(30) == 0
    assert told(lines)[-1]["error"]["code"] == "shutting_down"


def asked(server: PutServer, **more: Any) -> dict[str, Any]:
    """A request whose artifact goes to a server that takes it and says nothing."""
    target = {
        "kind": "presigned_http_put",
        "url": server.url("/object?signature=SECRET"),
        "expires_at": (datetime.now(UTC) + timedelta(seconds=1000)).isoformat(),
        "max_bytes": 10**6,
        "required_headers": {"if-none-match": "*"},
        "object_id": "x",
    }
    delivery = {"mode": "object_store", "target": target}
    artifact = {"format": "generation_artifact_v1", "contents": [], "delivery": delivery}
    return {"prompt": "hi", "max_tokens": 3, "generation_artifact": artifact} | more


@pytest.mark.parametrize("waits", [True, False], ids=["the client waits", "the client is gone"])
def test_a_second_signal_does_not_wait_for_an_artifact_on_its_way(waits: bool) -> None:
    with put_server(silent) as server:
        flags = ("--artifacts.allow-insecure-http", "--artifacts.insecure-http-hosts", server.authority)
        long = ("--artifacts.presigned-timeout-seconds", "600", "--artifacts.drain-timeout-seconds", "600")
        with served("--port", "0", *flags, *long, "--api.drain-seconds", "600") as (process, address):
            body = asked(server)
            outcomes: list[Any] = []

            def ask() -> None:
                try:
                    outcomes.append(
                        httpx2.post(f"{address}/v1/completions", json=body, timeout=60 if waits else 3).json()
                    )
                except httpx2.TimeoutException:
                    outcomes.append("gone")

            thread = threading.Thread(target=ask)
            thread.start()
            while not server.exchanges and thread.is_alive():
                pass
            if not waits:
                thread.join(30)
            process.send_signal(signal.SIGTERM)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(2)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
            thread.join(30)
            told = process.stderr.read() if process.stderr else ""
    assert "artifact_outcome_unknown" in told and "SECRET" not in told
    assert outcomes == ["gone"] if not waits else outcomes[0]["error"]["code"] == "shutting_down"


# -- signals before it serves ------------------------------------------------------------------------------------------

SLOW = """
import sys, time
from infer.cli.app import main
from infer.engine import startup

def stuck(*arguments):
    print("loading", file=sys.stderr, flush=True)
    time.sleep(600)

startup._plan = stuck
sys.exit(main(["serve", *sys.argv[1:]]))
"""
COMMAND = "import sys; from infer.cli.app import main; sys.exit(main(['serve', *sys.argv[1:]]))"


@contextmanager
def loading(script: str, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def read_to(process: subprocess.Popen[str], words: str) -> None:
    """Reads its stderr up to the line that has `words`."""
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if words in line:
            return
    raise AssertionError(f"it ended without saying {words!r}: {seen}")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_while_the_model_is_fetched_stops_it_and_leaves_nothing(
    number: int, code: int, tmp_path: Path
) -> None:
    """pip waits for an index that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as index:
        index.settimeout(60)
        environment = {
            "PIP_INDEX_URL": f"http://127.0.0.1:{index.getsockname()[1]}/simple",
            "PIP_CONFIG_FILE": os.devnull,
            "NO_PROXY": "127.0.0.1",
            "INFER_CACHE_DIR": str(tmp_path / "cache"),
        }
        arguments = ("pypi:some-model==1.0", "--uds", str(tmp_path / "socket"))
        with loading(COMMAND, *arguments, **environment) as process:
            connection, _ = index.accept()
            connection.settimeout(60)
            assert b"some-model" in connection.recv(65536)
            process.send_signal(number)
            read_to(process, "stopping: the model is not loaded yet")
            assert process.wait(30) == code
            assert process.stderr is not None and "Traceback" not in process.stderr.read()
            assert connection.recv(65536) == b""  # pip is gone
    assert not (tmp_path / "socket").exists()
    assert [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.suffix != ".lock"] == []
    for lock in (tmp_path / "cache" / "locks").iterdir():
        with lock.open() as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_second_signal_does_not_wait_for_a_load_that_is_stuck(tmp_path: Path) -> None:
    with loading(SLOW, "--uds", str(tmp_path / "socket")) as process:
        read_to(process, "loading")
        process.send_signal(signal.SIGTERM)
        read_to(process, "stopping: the model is not loaded yet")
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 143
    assert not (tmp_path / "socket").exists()


def test_admin_routes_are_where_the_flags_say(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    with served("--port", "0", "--api.admin", "--api.admin-uds", str(path)) as (process, address):
        assert process.stdout is not None
        assert process.stdout.readline() == f"admin routes on unix:{path}\n"
        transport = httpx2.HTTPTransport(uds=str(path))
        with (
            httpx2.Client(transport=transport, base_url="http://x") as admin,
            httpx2.Client(base_url=address) as public,
        ):
            assert admin.post("/abort_requests").status_code == 200
            assert public.post("/abort_requests").status_code == 404
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert not path.exists()


def test_settings_come_from_flags_and_environment() -> None:
    flags = ("--port", "0", "--served-model-name", "one,two")
    with served(*flags, INFER_API__API_KEYS="k1") as (_, address), httpx2.Client(base_url=address) as client:
        assert client.get("/v1/models").status_code == 401
        reply = client.get("/v1/models", headers={"authorization": "Bearer k1"})
    assert [card["id"] for card in reply.json()["data"]] == ["one", "two"]


def test_a_taken_port_is_one_line_before_any_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "/no/such/model", "--port", str(port)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.strip().startswith(f"infer: error: cannot listen on 127.0.0.1:{port}: Address already in use")
    assert captured.err.strip().count("\n") == 0


def test_a_model_that_is_not_there_leaves_the_port_free(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(tmp_path / "nothing"), "--uds", str(tmp_path / "socket")]) == 1
    assert "nothing" in capsys.readouterr().err
    assert not (tmp_path / "socket").exists()
