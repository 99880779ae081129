"""curl against a real server: whole replies, event streams as they come (-N), keys, a client that leaves, compressed bodies.
curl runs in a process of its own, the server in a thread."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from infer import Engine, EngineConfig
from infer.testing.fake_engine import fake_engine, scripted
from integration.live_server import LiveServer, live_server

ANSWER = "Olá 👋"


def answering(config: EngineConfig) -> Engine:
    return fake_engine(scripted(ANSWER), config, latency=0.005)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(answering, api={"api_keys": ["key"], "served_model_names": ["small"]}) as running:
        yield running


def curl(*arguments: str, data: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    command = ["curl", "--silent", "--show-error", "--max-time", "60", *arguments]
    return subprocess.run(command, input=data, capture_output=True, check=False, timeout=90)


def body(**fields: Any) -> list[str]:
    asked = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    return ["--json", json.dumps(asked), "--oauth2-bearer", "key"]


def test_a_reply_as_the_manual_shows_it(server: LiveServer) -> None:
    done = curl(server.url + "/v1/chat/completions", *body())
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout)["choices"][0]["message"]["content"] == ANSWER


def test_events_are_the_reply(server: LiveServer) -> None:
    done = curl("-N", server.url + "/v1/chat/completions", *body(stream=True))
    assert (done.returncode, done.stderr) == (0, b"")
    lines = [line for line in done.stdout.split(b"\n") if line]
    assert all(line.startswith(b"data: ") for line in lines)
    events = [line.removeprefix(b"data: ") for line in lines]
    assert events[-1] == b"[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == ANSWER


def endless(config: EngineConfig) -> Engine:
    return fake_engine(lambda ids, sampling: ord("a"), config, latency=0.01)


def test_events_arrive_while_the_answer_is_being_written() -> None:
    """The answer has no end: a chunk that waited for it would never come."""
    with live_server(endless, api={"api_keys": ["key"]}) as server:
        command = ["curl", "-sN", server.url + "/v1/chat/completions", *body(stream=True)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            for _ in range(5):
                assert b'"delta"' in process.stdout.readline()
                assert process.stdout.readline() == b"\n"
            assert server.statistics().running == 1
            process.kill()


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ([], 401),
        (["--oauth2-bearer", "wrong"], 401),
        (["--oauth2-bearer", "key", "--json", "{not json"], 400),
        (["--oauth2-bearer", "key", "--json", "[1]"], 400),
        (["--oauth2-bearer", "key", "--json", '{"messages": []}'], 400),
        (["--oauth2-bearer", "key", "-X", "PUT"], 405),
    ],
)
def test_refusals_are_json_with_the_right_status(server: LiveServer, arguments: list[str], status: int) -> None:
    if "--json" not in arguments and "-X" not in arguments:
        arguments = [*arguments, "--json", "{}"]
    done = curl(server.url + "/v1/chat/completions", "-w", "\n%{http_code}", *arguments)
    reply, _, code = done.stdout.rpartition(b"\n")
    assert int(code) == status, done.stdout
    assert json.loads(reply)["error"]["message"]


def test_http_2_without_tls(server: LiveServer) -> None:
    done = curl(server.url + "/v1/chat/completions", "--http2-prior-knowledge", "-w", "\n%{http_version}", *body())
    assert (done.returncode, done.stderr) == (0, b"")
    reply, _, version = done.stdout.rpartition(b"\n")
    assert version == b"2"
    assert json.loads(reply)["choices"][0]["message"]["content"] == ANSWER


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.row("X-ABORT", "a client that goes away frees its request, streaming or not (curl)")
def test_a_killed_curl_frees_its_request(stream: bool) -> None:
    with live_server(endless, api={"api_keys": ["key"]}) as server:
        command = ["curl", "-sN", server.url + "/v1/chat/completions", *body(stream=stream)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            server.wait_for(lambda now: now.running == 1)
            process.kill()
        server.wait_for(lambda now: now.running == 0 and now.waiting == 0)


def test_health_and_models(server: LiveServer) -> None:
    assert curl(server.url + "/health", "-f").returncode == 0
    done = curl(server.url + "/v1/models", "-f", "--oauth2-bearer", "key")
    assert [model["id"] for model in json.loads(done.stdout)["data"]] == ["small"]
    assert curl(server.url + "/v1/models", "-f", "-I", "--oauth2-bearer", "key").returncode == 0, "HEAD works too"


def test_a_large_body_is_waited_for_and_a_larger_one_refused(server: LiveServer) -> None:
    """curl asks with Expect: 100-continue before it sends megabytes."""
    for size, status in ((10 * 2**20, 400), (33 * 2**20, 413)):
        asked = json.dumps({"messages": [{"role": "user", "content": "x" * size}]}).encode()
        arguments = ["--oauth2-bearer", "key", "-H", "content-type: application/json", "--data-binary", "@-"]
        done = curl(server.url + "/v1/chat/completions", *arguments, "-w", "\n%{http_code}", data=asked)
        reply, _, code = done.stdout.rpartition(b"\n")
        assert (done.returncode, int(code)) == (0, status), done.stderr
        assert json.loads(reply)["error"]["code"] in ("context_length_exceeded", "body_too_long")
