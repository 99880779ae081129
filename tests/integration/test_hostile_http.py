"""Requests made to break the server: each may lose its own connection, never the server or another client's answer.
Runs a server over a scripted engine in the test's own event loop; owns nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import anyio
import httpx2
import pytest

from api_server import HELLO, MODEL, Server, in_process, on_loopback, until
from infer.engine.step import SamplingSpec

pytestmark = [pytest.mark.anyio, pytest.mark.row("SERVE-HTTP-TRANSPORT", "one hostile connection hurts nobody else")]
CHAT = "/v1/chat/completions"


def chat(**more: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **more}).encode()


async def send(server: Server, *pieces: bytes, hang_up: bool = False) -> bytes:
    """Everything the server says before it closes."""
    said = b""
    async with await anyio.connect_tcp(*server.where) as client:
        try:
            for piece in pieces:
                await client.send(piece)
            if hang_up:
                await client.send_eof()
            with anyio.fail_after(60):
                while True:
                    said += await client.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            return said


async def still_serves(server: Server) -> None:
    async with httpx2.AsyncClient(base_url=server.address) as client:
        reply = await client.post(CHAT, content=chat())
        assert reply.json()["choices"][0]["message"]["content"] == HELLO


@pytest.mark.parametrize(
    "upgrade",
    [
        b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AA\r\n",
        b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: !\r\n",
        b"connection: upgrade\r\nupgrade: h2c\r\n",
    ],
)
async def test_a_broken_upgrade_to_http2_loses_its_own_connection_only(upgrade: bytes) -> None:
    """What hypercorn raises there ended the whole server on trio, without any key."""
    async with on_loopback() as server:
        await send(server, b"GET /v1/models HTTP/1.1\r\nhost: x\r\n" + upgrade + b"\r\n", hang_up=True)
        await still_serves(server)


async def test_two_lengths_of_one_body_are_refused_and_the_connection_is_closed() -> None:
    async with on_loopback() as server:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n".encode()
        said = await send(server, head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(chat()), chat()))
        assert said.startswith(b"HTTP/1.1 400") and b"exclude each other" in said
        await still_serves(server)


@pytest.mark.parametrize("name", ["self", "", "a b", "template", "variables", "raise_exception"])
async def test_any_name_may_be_a_template_variable(name: str) -> None:
    async with in_process() as (client, _):
        reply = await client.post(CHAT, content=chat(chat_template_kwargs={name: 2}))
        assert reply.status_code == 200


async def test_a_client_that_hangs_up_on_its_pipelined_requests_leaves_no_task() -> None:
    def endless(token_ids: Sequence[int], sampling: SamplingSpec) -> int:
        return 97

    async with on_loopback(endless, latency=0.001) as server:
        await still_open(server)
        before = len(anyio.get_running_tasks())
        body = chat(stream=True, max_tokens=200)
        one = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (CHAT.encode(), len(body)) + body
        async with await anyio.connect_tcp(*server.where) as client:
            await client.send(one * 20)
            assert await client.receive()
        await until(lambda: len(anyio.get_running_tasks()) <= before)


async def still_open(server: Server) -> None:
    """One connection that comes and goes: tasks that live as long as the server are there now."""
    async with httpx2.AsyncClient(base_url=server.address) as client:
        assert (await client.get("/ping")).status_code == 200
    await anyio.sleep(0.1)
