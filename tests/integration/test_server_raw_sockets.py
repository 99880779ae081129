"""Raw sockets against the server: pipelining, half-sent and huge bodies, long heads, slow senders, early ends.
After each the server must still answer, with nothing left running."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import AsyncIterator
from typing import Any

import anyio
import httpx2
import pytest

from api_server import HELLO, MODEL, Server, on_loopback, until

pytestmark = [pytest.mark.anyio, pytest.mark.row("SERVE-HTTP-TRANSPORT", "the server survives what sockets can send")]
CHAT = b"/v1/chat/completions"


def request(body: bytes, *, path: bytes = CHAT, length: int | None = None, more: bytes = b"") -> bytes:
    head = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n%s\r\n"
    return head % (path, len(body) if length is None else length, more) + body


def chat(**more: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **more}).encode()


async def talk(server: Server, *pieces: bytes, replies: int = 1) -> list[tuple[int, bytes]]:
    """Send, and read so many replies: (status, body)."""
    async with await anyio.connect_tcp(*server.where) as client:
        for piece in pieces:
            await client.send(piece)
        found = []
        buffer = b""
        for _ in range(replies):
            with anyio.fail_after(60):
                while b"\r\n\r\n" not in buffer:
                    buffer += await client.receive()
                head, _, buffer = buffer.partition(b"\r\n\r\n")
                length = int(re.search(rb"content-length: (\d+)", head).group(1))  # type: ignore[union-attr]
                while len(buffer) < length:
                    buffer += await client.receive()
            found.append((int(head.split(b" ", 2)[1]), buffer[:length]))
            buffer = buffer[length:]
        return found


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with on_loopback(settings={"max_body_bytes": 2**20, "body_timeout": 0.5}) as server:
        yield server
        async with httpx2.AsyncClient(base_url=server.address) as client:
            reply = await client.post(CHAT.decode(), content=chat())
            assert reply.json()["choices"][0]["message"]["content"] == HELLO
        await until(lambda: server.engine.statistics().running == 0 and len(server.calls) == 0)


async def test_pipelined_requests_are_answered_in_order(server: Server) -> None:
    texts = ["one", "two", "three"]
    bodies = [json.dumps({"prompt": text, "echo": True, "max_tokens": 1}).encode() for text in texts]
    replies = await talk(server, b"".join(request(body, path=b"/v1/completions") for body in bodies), replies=3)
    assert [status for status, _ in replies] == [200] * 3
    assert [json.loads(body)["choices"][0]["text"] for _, body in replies] == [text + "H" for text in texts]


async def test_a_body_in_small_pieces(server: Server) -> None:
    data = request(chat())
    [(status, _)] = await talk(server, *(data[i : i + 7] for i in range(0, len(data), 7)))
    assert status == 200


async def test_a_chunked_body(server: Server) -> None:
    body = chat()
    head = b"POST " + CHAT + b" HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    [(status, _)] = await talk(server, head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
    assert status == 200


async def test_a_half_sent_body_is_given_up(server: Server) -> None:
    [(status, body)] = await talk(server, request(chat()[:20], length=500))
    assert status == 408 and json.loads(body)["error"]["code"] == "body_timeout"


async def test_a_connection_closed_in_the_middle_of_a_body(server: Server) -> None:
    async with await anyio.connect_tcp(*server.where) as client:
        await client.send(request(chat()[:20], length=500))


@pytest.mark.parametrize("announced", [True, False])
async def test_a_ten_megabyte_body_is_refused_and_the_reply_is_readable(server: Server, announced: bool) -> None:
    size = 10 * 2**20
    if announced:
        pieces = [request(b"x" * size)]
    else:
        head = b"POST " + CHAT + b" HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        pieces = [head, *[b"10000\r\n" + b"x" * 0x10000 + b"\r\n"] * (size // 0x10000), b"0\r\n\r\n"]
    [(status, body)] = await talk(server, *pieces)
    assert status == 413 and json.loads(body)["error"]["code"] == "body_too_long"


async def test_a_large_body_within_the_limit(server: Server) -> None:
    [(status, body)] = await talk(server, request(chat(user="x" * 900_000)))
    assert status == 200 and json.loads(body)["choices"]


async def test_a_refused_request_with_an_unread_body_keeps_the_connection_in_step(server: Server) -> None:
    """404 and 405 do not read the body; the next request on the connection must not see it."""
    lost = request(b"x" * 300_000, path=b"/nowhere")
    replies = await talk(server, lost, request(chat()), replies=2)
    assert [status for status, _ in replies] == [404, 200]


async def test_a_long_head_is_refused(server: Server) -> None:
    async with await anyio.connect_tcp(*server.where) as client:
        await client.send(b"GET /ping HTTP/1.1\r\nhost: x\r\nx-long: " + b"y" * 200_000)
        data = await client.receive()
    assert data.startswith(b"HTTP/1.1 431")


@pytest.mark.parametrize("noise", [b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n", b"\r\n\r\n\r\n", b"\xff" * 100])
async def test_noise_is_not_http(server: Server, noise: bytes) -> None:
    async with await anyio.connect_tcp(*server.where) as client:
        await client.send(noise)
        await client.send_eof()
        with anyio.fail_after(60):
            try:
                while await client.receive():
                    pass
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                pass


async def test_a_bad_expectation_of_utf8_in_path_and_query(server: Server) -> None:
    for path in (b"/v1/%ff%fe", b"/ping?%ff=%fe", b"/v1/models/%F0%9F%A7%80"):
        async with await anyio.connect_tcp(*server.where) as client:
            await client.send(b"GET " + path + b" HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await client.receive()).split(b" ")[1] in (b"200", b"404")


async def test_many_connections_that_send_nothing(server: Server) -> None:
    idle = [socket.create_connection(server.where) for _ in range(100)]
    [(status, _)] = await talk(server, request(chat()))
    assert status == 200
    for connection in idle:
        connection.close()


async def test_expect_100_continue(server: Server) -> None:
    body = chat()
    async with await anyio.connect_tcp(*server.where) as client:
        await client.send(request(b"", length=len(body), more=b"expect: 100-continue\r\n"))
        assert (await client.receive()).startswith(b"HTTP/1.1 100")
        await client.send(body)
        assert (await client.receive()).startswith(b"HTTP/1.1 200")
