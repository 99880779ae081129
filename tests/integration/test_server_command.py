"""`infer serve` as a process of its own: it says where it listens, and stops as signals ask. The engine is scripted."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from api_server import events
from infer.cli.app import main

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
