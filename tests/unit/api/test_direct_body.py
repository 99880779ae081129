"""Pieces of a stream that go past hypercorn: nothing is lost, repeated or out of order, whatever the client does."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Sequence
from typing import Any

import anyio
import anyio.to_thread
import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_server import MODEL, events, on_loopback
from infer.api.connections import MAX_DIRECT, DirectBody
from infer.api.sse import EventFrame
from infer.engine.step import SamplingSpec

COMPLETIONS = "/v1/completions"
TOKENS = 600


def alphabet(token_ids: Sequence[int], sampling: SamplingSpec) -> int:
    return 97 + len(token_ids) % 26


TEXT = "".join(chr(alphabet([0] * (2 + i), SamplingSpec(seed=0))) for i in range(TOKENS))
BODY = {"model": MODEL, "prompt": "hi", "max_tokens": TOKENS, "stream": True, "logprobs": 5, "ignore_eos": True}


def text_of(body: str) -> str:
    told = events(body)
    assert told[-1] == "[DONE]"
    return "".join(choice["text"] for event in told[:-1] for choice in json.loads(event)["choices"])


class Transport:
    def __init__(self, *, waiting: int = 0, closing: bool = False) -> None:
        self.waiting, self.closing, self.written = waiting, closing, b""

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def is_closing(self) -> bool:
        return self.closing

    def write(self, data: bytes) -> None:
        self.written += data


def test_it_writes_a_chunk_or_nothing() -> None:
    free, behind, gone = Transport(), Transport(waiting=MAX_DIRECT + 1), Transport(closing=True)
    assert DirectBody(None, free).write(b"x" * 26) is True
    assert free.written == b"1a\r\n" + b"x" * 26 + b"\r\n"
    for transport in (behind, gone):
        assert DirectBody(None, transport).write(b"x") is False and transport.written == b""


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("scope", "offered"),
    [
        ({"type": "http", "http_version": "1.1", "method": "POST"}, True),
        ({"type": "http", "http_version": "1.1", "method": "HEAD"}, False),
        ({"type": "http", "http_version": "1.0", "method": "POST"}, False),
        ({"type": "http", "http_version": "2", "method": "POST"}, False),
        ({"type": "lifespan"}, False),
    ],
)
async def test_it_is_offered_where_a_body_is_chunked(scope: dict[str, Any], offered: bool) -> None:
    seen: list[Any] = []

    async def app(scope: dict[str, Any], *more: Any) -> None:
        seen.append(("infer.direct" in scope, more))

    await DirectBody(app, Transport())(scope, 1, 2)
    assert seen == [(offered, (1, 2))]


@pytest.mark.anyio
async def test_a_reader_that_falls_behind_gets_everything_once(
    monkeypatch: pytest.MonkeyPatch, anyio_backend_name: str
) -> None:
    """Small buffers: the stream changes between both ways all the time."""
    is_offered = anyio_backend_name == "asyncio"  # hypercorn's trio server has it not
    outcomes: list[bool] = []
    behind = threading.Event()
    write = DirectBody.write

    def counted(self: DirectBody, data: bytes) -> bool:
        outcomes.append(write(self, data))
        if not outcomes[-1]:
            behind.set()
        return outcomes[-1]

    monkeypatch.setattr(DirectBody, "write", counted)
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    listening.bind(("127.0.0.1", 0))
    with listening:
        async with on_loopback(alphabet, settings={"fd": listening.fileno()}) as server:
            reply = await anyio.to_thread.run_sync(read_late, server.where, behind if is_offered else None)
    assert text_of(reply) == TEXT
    assert set(outcomes) == ({True, False} if is_offered else set())


def read_late(where: tuple[str, int], behind: threading.Event | None) -> str:
    """A raw client with a small window that waits, then reads a little at a time; undoes the chunks itself."""
    data = json.dumps(BODY).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(where)
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data) + data)
        assert behind is None or behind.wait(30)
        received = b""
        while b"\r\n0\r\n\r\n" not in received[-16:]:
            received += client.recv(2048)
    body, rest = b"", received.partition(b"\r\n\r\n")[2]
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body += rest[: int(size, 16)]
        assert rest[int(size, 16) :][:2] == b"\r\n"
        rest = rest[int(size, 16) + 2 :]
    return body.decode()


@pytest.mark.anyio
async def test_clients_of_other_versions_get_the_same_text() -> None:
    async with on_loopback(alphabet) as server:
        async with httpx2.AsyncClient(base_url=server.address, http1=False, http2=True, timeout=30) as client:
            second = await client.post(COMPLETIONS, json=BODY)
        async with httpx2.AsyncClient(base_url=server.address, timeout=30) as client:
            first = await client.post(COMPLETIONS, json=BODY)
            keep_alive = await client.get("/ping")  # the connection is as it was
        data = json.dumps(BODY).encode()
        async with await anyio.connect_tcp(*server.where) as old:
            await old.send(b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % len(data) + data)
            received = b""
            with anyio.fail_after(30):
                while b"[DONE]" not in received:
                    received += await old.receive()
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    assert text_of(body.decode()) == text_of(first.text) == text_of(second.text) == TEXT
    assert (first.http_version, second.http_version) == ("HTTP/1.1", "HTTP/2") and keep_alive.status_code == 200


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
keys = st.text(alphabet="abcdef", min_size=1, max_size=4)


@given(
    head=st.dictionaries(keys, values, min_size=1, max_size=3),
    choice=st.dictionaries(keys, values, max_size=3),
    more=st.dictionaries(keys.map(str.upper), values, max_size=3),
)
def test_a_framed_event_is_the_object(head: dict[str, Any], choice: dict[str, Any], more: dict[str, Any]) -> None:
    event = EventFrame(head).event(choice, more)
    assert event.startswith(b"data: ") and event.endswith(b"}\n\n") and event.count(b"\n") == 2
    assert json.loads(event[6:]) == {**head, "choices": [choice], **more}
