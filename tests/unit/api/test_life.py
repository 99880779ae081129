"""A server on loopback: it starts, streams at once, notices who goes away, tells failures, and stops as asked."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from api_server import HELLO, MODEL, Server, api_settings, events, on_loopback, open_engine, until
from infer.api import open_listener, serve
from infer.api.app import all_routes, build_context
from infer.api.health import probe_deadline
from infer.config.engine import ApiSection, EngineConfig
from infer.engine.step import SamplingSpec, StepPlan
from infer.errors import ConfigError, EngineDeadError
from infer.testing.fake_engine import scripted

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"


def endless(token_ids: Sequence[int], sampling: SamplingSpec) -> int:
    return 97


def ask(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **more}


def raw(body: dict[str, Any], path: str = CHAT, headers: str = "") -> bytes:
    data = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n{headers}\r\n".encode() + data


async def read_until(stream: anyio.abc.ByteReceiveStream, mark: bytes) -> bytes:
    data = b""
    while mark not in data:
        data += await stream.receive()
    return data


# -- streams -----------------------------------------------------------------------------------------------------------


@pytest.mark.row("SERVE-HTTP-TRANSPORT", "a chunk reaches the client before the next token is computed")
async def test_each_chunk_arrives_before_the_next_token_is_computed() -> None:
    known = 0

    def fail_at(plan: StepPlan) -> None:
        nonlocal known
        known += len(plan.slots)

    async with on_loopback(endless, latency=0.25) as server:
        server.worker.fail_at = fail_at  # type: ignore[assignment]
        async with await anyio.connect_tcp(*server.where) as client:
            await client.send(raw(ask(stream=True, max_tokens=20)))
            data = await read_until(client, b'"content":"a"')
            assert data.count(b'"content":"a"') == 1 and known <= 3  # one delivered, at most two in flight


def delays_of_connections_from(port: int) -> list[int]:
    """TCP_NODELAY of this process's sockets whose other end has that port."""
    found = []
    for name in (path.name for path in Path("/proc/self/fd").iterdir()):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as copy:
                if copy.family == socket.AF_INET and copy.getpeername()[1] == port:
                    found.append(copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        except OSError:  # closed, or listening
            continue
    return found


@pytest.mark.row("SERVE-HTTP-TRANSPORT", "TCP_NODELAY is set on accepted sockets")
async def test_accepted_sockets_do_not_delay() -> None:
    async with on_loopback(endless, latency=0.05) as server, await anyio.connect_tcp(*server.where) as client:
        await client.send(raw(ask(stream=True, max_tokens=100)))
        await read_until(client, b"assistant")
        own = client.extra(anyio.abc.SocketAttribute.local_port)
        options = delays_of_connections_from(own)
    assert options and all(options)


@pytest.mark.row("SERVE-HTTP-TRANSPORT", "a silent prefill sends keep-alive comments")
async def test_silence_is_filled_with_comments() -> None:
    async with (
        on_loopback(latency=0.4, settings={"sse_keep_alive": 0.1}) as server,
        httpx2.AsyncClient(base_url=server.address) as client,
    ):
        reply = await client.post(CHAT, json=ask(stream=True, max_tokens=2))
    comments = [line for line in reply.text.split("\n") if line.startswith(":")]
    assert len(comments) >= 2
    assert events(reply.text)[-1] == "[DONE]"


@pytest.mark.row("X-PROGRESS", "a 10-chunk prefill emits monotonic progress")
async def test_prefill_progress() -> None:
    config = EngineConfig(scheduler={"max_num_batched_tokens": 64}, cache={"num_blocks": 128})
    async with (
        on_loopback(latency=0.06, config=config, settings={"sse_keep_alive": 0.1}) as server,
        httpx2.AsyncClient(base_url=server.address) as client,
    ):
        body = {"prompt": "x" * 640, "stream": True, "max_tokens": 2}
        reply = await client.post("/v1/completions", json={**body, "return_progress": True})
        plain = await client.post("/v1/completions", json={**body, "prompt": "y" * 640})
    told = [
        chunk["prompt_progress"]["processed"]
        for chunk in map(json.loads, events(reply.text)[:-1])
        if "prompt_progress" in chunk
    ]
    assert len(told) >= 3 and told == sorted(set(told)) and told[-1] == 640
    assert all(json.loads(event)["choices"] for event in events(plain.text)[:-1])


# -- clients that go away ----------------------------------------------------------------------------------------------


@pytest.mark.row("X-ABORT", "blocks free within two steps of the socket closing, in stream and non-stream mode")
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_frees_its_blocks(stream: bool) -> None:
    async with on_loopback(endless, latency=0.2) as server:
        async with await anyio.connect_tcp(*server.where) as client:
            await client.send(raw(ask(stream=stream, max_tokens=1000, n=2)))
            await until(lambda: server.engine.statistics().running == 2)
            before = server.engine.statistics().steps
        await until(lambda: server.engine.statistics().running == 0)
        now = server.engine.statistics()
        assert now.steps <= before + 2
        assert now.kv_usage == 0


async def test_a_client_that_goes_away_while_it_sends_its_body_leaves_nothing() -> None:
    async with on_loopback() as server:
        async with await anyio.connect_tcp(*server.where) as client:
            await client.send(raw(ask())[:-5])
            await anyio.sleep(0.05)
        async with httpx2.AsyncClient(base_url=server.address) as client:
            assert (await client.post(CHAT, json=ask())).status_code == 200
        assert server.engine.statistics().running == 0


async def test_a_client_that_never_reads_is_dropped_and_slows_nobody() -> None:
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # accepted sockets inherit it
    listening.bind(("127.0.0.1", 0))
    settings = {"write_timeout": 1.0, "sse_keep_alive": 0.2, "fd": listening.fileno()}
    with listening, socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        async with on_loopback(endless, settings=settings) as server:
            server.worker.check = False
            lazy.connect(server.where)
            lazy.sendall(raw(ask(stream=True, max_tokens=2000)))
            await until(lambda: server.engine.statistics().running == 1)
            async with httpx2.AsyncClient(base_url=server.address) as client:
                assert (await client.post(CHAT, json=ask(max_tokens=2))).status_code == 200
            await until(lambda: server.engine.statistics().running == 0)  # computed to its end, or dropped
            await until(lambda: len(server.calls) == 0)


# -- failures ----------------------------------------------------------------------------------------------------------


def failing_after(server: Server, steps: int, error: Exception) -> None:
    count = 0

    def fail_at(plan: StepPlan) -> Exception | None:
        nonlocal count
        count += 1
        return error if count == steps else None

    server.worker.fail_at = fail_at


async def test_a_failed_step_ends_a_stream_with_an_error_event_and_the_end_mark() -> None:
    async with on_loopback() as server, httpx2.AsyncClient(base_url=server.address) as client:
        failing_after(server, 4, ValueError("boom in the kernel"))
        streamed = events((await client.post(CHAT, json=ask(stream=True))).text)
        failing_after(server, 4, ValueError("boom in the kernel"))
        whole = await client.post(CHAT, json=ask())
        after = await client.post(CHAT, json=ask())
    assert streamed[-1] == "[DONE]"
    error = json.loads(streamed[-2])["error"]
    assert (
        error["type"] == "server_error" and error["code"] == "step_failed" and "boom in the kernel" in error["message"]
    )
    assert not any(json.loads(event).get("choices", [{}])[0].get("finish_reason") for event in streamed[:-2])
    assert whole.status_code == 500 and whole.json()["error"] == error | {"message": whole.json()["error"]["message"]}
    assert after.status_code == 200


@pytest.mark.row("SERVE-DISCOVERY-HEALTH", "after the engine dies /health answers 503 at once")
async def test_a_dead_engine_turns_health_red_and_answers_503() -> None:
    async with on_loopback() as server, httpx2.AsyncClient(base_url=server.address) as client:
        assert (await client.get("/health")).status_code == 200
        failing_after(server, 3, EngineDeadError("the device fell off the bus"))
        streamed = events((await client.post(CHAT, json=ask(stream=True))).text)
        health = await client.get("/health")
        ready = await client.get("/ready")
        later = await client.post(CHAT, json=ask(stream=True))
        ping = await client.get("/ping")
    assert streamed[-1] == "[DONE]" and "fell off the bus" in streamed[-2]
    assert health.status_code == ready.status_code == 503
    assert later.status_code == 503 and later.json()["error"]["code"] == "engine_dead"
    assert "fell off the bus" in later.json()["error"]["message"]
    assert ping.status_code == 200


def hang(server: Server) -> None:
    server.engine._open_parts().executor.latency = 3600.0  # type: ignore[attr-defined]


@pytest.mark.row("SERVE-DISCOVERY-HEALTH", "after the engine hangs /health answers 503 within 2 s, where so configured")
async def test_a_probe_that_is_not_answered_turns_health_red_and_it_stays_red() -> None:
    async with (
        on_loopback(endless, settings={"health_probe_deadline": 2.0}) as server,
        httpx2.AsyncClient(base_url=server.address, timeout=30) as client,
    ):
        assert (await client.get("/health")).status_code == 200
        hang(server)
        began = anyio.current_time()
        first = await client.get("/health")
        took = anyio.current_time() - began
        second = await client.get("/health")  # the probe that hangs counts as work: it must not pass for health
    assert first.status_code == second.status_code == 503 and took >= 2.0
    assert "within 2 s" in first.json()["error"]["message"]
    assert "has not completed a probe step" in second.json()["error"]["message"]


async def test_a_client_that_gives_up_does_not_make_the_engine_healthy() -> None:
    async with (
        on_loopback(endless, settings={"health_probe_deadline": 1.0}) as server,
        httpx2.AsyncClient(base_url=server.address, timeout=30) as client,
    ):
        assert (await client.get("/health")).status_code == 200
        hang(server)
        with pytest.raises(httpx2.ReadTimeout):
            await client.get("/health", timeout=0.2)
        await until(lambda: server.contexts[0].health.probe_waits_for > 1.0)
        assert (await client.get("/health")).status_code == 503


@pytest.mark.row("SERVE-DISCOVERY-HEALTH", "/health answers 200 only while a probe step completes")
async def test_a_slow_step_is_not_a_red_one_and_one_that_completes_makes_health_green_again() -> None:
    async with (
        on_loopback(endless, latency=0.3, settings={"health_probe_deadline": 0.05}) as server,
        httpx2.AsyncClient(base_url=server.address, timeout=30) as client,
    ):
        red = await client.get("/health")
        await until(lambda: server.engine.statistics().running == 0)
        server.contexts[0].settings = server.contexts[0].settings.model_copy(update={"health_probe_deadline": None})
        green = await client.get("/health")
    assert (red.status_code, green.status_code) == (503, 200)


@pytest.mark.row("SERVE-DISCOVERY-HEALTH", "a step that is overdue turns /health red")
async def test_a_stuck_step_turns_health_red() -> None:
    async with (
        on_loopback(endless, settings={"health_deadline": 0.5, "health_probe_deadline": 0.5}) as server,
        httpx2.AsyncClient(base_url=server.address) as client,
    ):
        hang(server)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: client.post(CHAT, json=ask()))
            await until(lambda: server.contexts[0].health.stuck_for > 0.5)
            busy = await client.get("/health")
            tasks.cancel_scope.cancel()
    assert busy.status_code == 503 and "no step has completed" in busy.json()["error"]["message"]


def test_the_probe_has_slack_and_never_more_time_than_a_step() -> None:
    assert probe_deadline(ApiSection()) == 10.0
    assert probe_deadline(ApiSection(health_deadline=60)) == 20.0
    assert probe_deadline(ApiSection(health_probe_deadline=4)) == 4.0
    assert probe_deadline(ApiSection(health_probe_deadline=90)) == 30.0


# -- start and stop ----------------------------------------------------------------------------------------------------


async def test_a_gentle_stop_lets_running_requests_finish_and_refuses_new_ones() -> None:
    async with on_loopback(latency=0.05) as server, httpx2.AsyncClient(base_url=server.address) as client:
        replies: list[httpx2.Response] = []

        async def one() -> None:
            replies.append(await client.post(CHAT, json=ask(stream=True)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one)
            await until(lambda: server.engine.statistics().running == 1)
            server.stop.set()
            await anyio.sleep(0.05)
            refused = await client.post(CHAT, json=ask())
            ready = await client.get("/ready")
    assert "".join(texts(replies[0].text)) == HELLO
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
    assert refused.headers["retry-after"] and ready.status_code == 503


async def test_requests_that_outlast_the_drain_get_an_error_event() -> None:
    settings = {"drain_seconds": 0.2}
    async with (
        on_loopback(endless, latency=0.05, settings=settings) as server,
        httpx2.AsyncClient(base_url=server.address, timeout=30) as client,
    ):
        replies: dict[bool, httpx2.Response] = {}

        async def one(stream: bool) -> None:
            replies[stream] = await client.post(CHAT, json=ask(stream=stream, max_tokens=1000))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one, True)
            tasks.start_soon(one, False)
            await until(lambda: server.engine.statistics().running == 2)
            server.stop.set()
    streamed = events(replies[True].text)
    assert streamed[-1] == "[DONE]" and json.loads(streamed[-2])["error"]["code"] == "shutting_down"
    assert replies[False].status_code == 503


def texts(body: str) -> list[str]:
    chunks = [json.loads(event) for event in events(body)[:-1]]
    return [choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]]


async def test_cancelling_ends_it_at_once_with_connections_open() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    async with open_engine(endless, latency=0.05) as (engine, _), anyio.create_task_group() as outer:
        address = await outer.start(serve, engine, api_settings())
        host, port = address.rpartition("//")[2].rsplit(":", 1)
        client = socket.create_connection((host, int(port)))
        client.sendall(raw(ask(stream=True, max_tokens=1000)))
        await until(lambda: engine.statistics().running == 1)
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
        outer.cancel_scope.cancel()  # leaving the block waits for the server
    data = b""
    while piece := client.recv(65536):
        data += piece
    client.close()
    assert b"shutting_down" in data and b"data: [DONE]" in data


async def test_two_servers_of_one_process_over_one_engine() -> None:
    async with open_engine() as (engine, _), anyio.create_task_group() as tasks:
        addresses = [await tasks.start(serve, engine, api_settings(served_model_names=(n,))) for n in ("one", "two")]
        async with httpx2.AsyncClient() as client:
            names = [(await client.get(f"{a}/v1/models")).json()["data"][0]["id"] for a in addresses]
        tasks.cancel_scope.cancel()
    assert names == ["one", "two"]


async def test_a_taken_port_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: Address already in use"):
            open_listener(ApiSection(port=port))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"host": "no.such.host.invalid"}, "no.such.host.invalid"),
        ({"uds": "/no/such/directory/s"}, "unix:/no/such"),
        ({"fd": 9999}, "api.fd=9999"),
        ({"tls_cert": "/no/cert", "tls_key": "/no/key"}, "tls_cert"),
    ],
)
def test_places_where_nobody_can_listen(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_listener(ApiSection(**settings))
    assert words in str(caught.value) and "\n" not in str(caught.value)


async def test_a_unix_socket_and_a_stale_one(tmp_path: Path) -> None:
    path = tmp_path / "infer.sock"
    for _ in range(2):
        async with on_loopback(settings={"uds": str(path)}) as server:
            assert server.address == f"unix:{path}"
            with pytest.raises(ConfigError, match="in use"):
                open_listener(ApiSection(uds=str(path)))
            transport = httpx2.AsyncHTTPTransport(uds=str(path))
            async with httpx2.AsyncClient(transport=transport, base_url="http://x") as client:
                assert (await client.post(CHAT, json=ask())).status_code == 200
        assert not path.exists()
        left = socket.socket(socket.AF_UNIX)
        left.bind(str(path))
        left.close()  # nobody listens: as a killed server leaves it


async def test_an_inherited_socket() -> None:
    with socket.create_server(("127.0.0.1", 0)) as inherited:
        async with on_loopback(settings={"fd": inherited.fileno()}) as server:
            assert server.where == inherited.getsockname()
            async with httpx2.AsyncClient(base_url=server.address) as client:
                assert (await client.get("/ping")).status_code == 200


async def test_https(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    more = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    await anyio.run_process([*command.split(), *more])
    async with on_loopback(settings={"tls_cert": str(cert), "tls_key": str(key)}) as server:
        assert server.address.startswith("https://")
        async with httpx2.AsyncClient(
            base_url=server.address, verify=ssl.create_default_context(cafile=str(cert))
        ) as client:
            reply = await client.post(CHAT, json=ask(stream=True))
    assert "".join(texts(reply.text)) == HELLO


async def test_admin_routes_are_not_there_unless_enabled() -> None:
    async with open_engine(scripted("x")) as (engine, _):
        plain = {route.path for route in all_routes(build_context(engine, api_settings()))}
        admin = all_routes(build_context(engine, api_settings(admin=True)))
    assert {route.path for route in admin if route.admin}.isdisjoint(plain)
