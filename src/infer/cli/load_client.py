"""The client behind `infer bench serve`: plain HTTP/1.1 with server-sent events, cheap enough not to be what is measured.

Runs in the benchmark's event loop, one task per request; owns the idle connections.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import anyio
import msgspec
from anyio.abc import ByteStream
from anyio.streams.buffered import BufferedByteReceiveStream

from infer.errors import ConfigError, InferError

MAX_HEAD = 65536
TIMEOUT = 600.0
"""Seconds without a byte after which a request counts as lost."""


class LoadError(InferError):
    """A request that did not end well. `status` is 0 when there was no reply."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class _Connection:
    def __init__(self, stream: ByteStream) -> None:
        self.stream = stream
        self.buffer = BufferedByteReceiveStream(stream)
        self.fresh = True

    async def close(self) -> None:
        with suppress(OSError, anyio.BrokenResourceError):
            await anyio.aclose_forcefully(self.stream)


class Reply:
    """One reply, read piece by piece as it arrives."""

    def __init__(self, connection: _Connection, status: int, headers: dict[str, str]) -> None:
        self.connection = connection
        self.status = status
        self.headers = headers
        self.ended = False
        self._chunked = headers.get("transfer-encoding") == "chunked"
        self._left = int(headers["content-length"]) if "content-length" in headers else None
        self._line = b""

    @property
    def reusable(self) -> bool:
        """The connection can carry another request."""
        framed = self._chunked or self._left is not None
        return self.ended and framed and self.headers.get("connection") != "close"

    async def piece(self) -> bytes | None:
        """What arrived next: a chunk, or all that is left. None at the end."""
        if self.ended:
            return None
        with anyio.fail_after(TIMEOUT):
            found = await self._next()
        self.ended = found is None
        return found

    async def _next(self) -> bytes | None:
        buffer = self.connection.buffer
        if self._chunked:
            size = int((await buffer.receive_until(b"\r\n", 1024)).split(b";")[0], 16)
            chunk = await buffer.receive_exactly(size + 2)
            return chunk[:-2] if size else None
        if self._left is not None:
            size, self._left = self._left, 0
            return await buffer.receive_exactly(size) if size else None
        try:
            return await buffer.receive()
        except anyio.EndOfStream:
            return None

    async def read(self) -> bytes:
        pieces = []
        while (piece := await self.piece()) is not None:
            pieces.append(piece)
        return b"".join(pieces)

    async def events(self) -> list[Any] | None:
        """The server-sent events that came whole with the next piece, decoded. None at the end."""
        piece = await self.piece()
        if piece is None:
            return None
        *lines, self._line = (self._line + piece).split(b"\n")
        found = []
        for line in lines:
            if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                event = msgspec.json.decode(data)
                if isinstance(event, dict) and event.get("error"):
                    raise LoadError(_message(event, self.status))
                found.append(event)
        return found


class LoadClient:
    """`base_url` with or without /v1. Connections are kept and used again."""

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        url = urlsplit(base_url if "://" in base_url else f"http://{base_url}")
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ConfigError(f"--base-url {base_url!r} is no http:// or https:// address")
        self._tls = url.scheme == "https"
        self._host = url.hostname
        self._port = url.port or (443 if self._tls else 80)
        self._root = url.path.rstrip("/").removesuffix("/v1")
        self._head = f"Host: {url.netloc.rpartition('@')[2]}\r\nAccept: */*\r\nUser-Agent: infer-bench\r\n"
        if api_key is not None:
            self._head += f"Authorization: Bearer {api_key}\r\n"
        self._idle: list[_Connection] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._idle:
            await self._idle.pop().close()

    async def get(self, path: str) -> Any:
        """The JSON at `path`. Raises `LoadError`."""
        async with self.request("GET", path) as reply:
            return msgspec.json.decode(await reply.read())

    @asynccontextmanager
    async def request(self, method: str, path: str, body: Any = None) -> AsyncIterator[Reply]:
        """The reply, once its head is here. Leaving it unread closes the connection. Raises `LoadError`."""
        data = b"" if body is None else msgspec.json.encode(body)
        head = f"{method} {self._root}{path} HTTP/1.1\r\n{self._head}"
        if body is not None:
            head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        reply: Reply | None = None
        try:
            reply = await self._ask(head.encode("latin-1") + b"\r\n" + data)
            if reply.status >= 400:
                raise LoadError(_message(_json_or_none(await reply.read()), reply.status), reply.status)
            yield reply
        except (OSError, anyio.BrokenResourceError, anyio.EndOfStream, anyio.IncompleteRead) as error:
            raise LoadError(
                f"the connection to {self._host}:{self._port} failed: {_reason(error)}; is a server running there?"
            ) from None
        except (anyio.DelimiterNotFound, ValueError, IndexError) as error:
            raise LoadError(f"{self._host}:{self._port} does not speak HTTP/1.1 as expected: {error}") from None
        finally:
            if reply is not None and reply.reusable:
                reply.connection.fresh = False
                self._idle.append(reply.connection)
            elif reply is not None:
                await reply.connection.close()

    async def _ask(self, request: bytes) -> Reply:
        """Send it and read the reply's head. A kept connection may be closed by now: then once more on a new one."""
        while True:
            connection = self._idle.pop() if self._idle else _Connection(await self._connect())
            try:
                await connection.stream.send(request)
                with anyio.fail_after(TIMEOUT):
                    head = await connection.buffer.receive_until(b"\r\n\r\n", MAX_HEAD)
                first, *lines = head.decode("latin-1").split("\r\n")
                pairs = (line.partition(":") for line in lines)
                headers = {name.lower(): value.strip().lower() for name, _, value in pairs}
                return Reply(connection, int(first.split(" ")[1]), headers)
            except (OSError, anyio.BrokenResourceError, anyio.EndOfStream, anyio.IncompleteRead):
                await connection.close()
                if connection.fresh:
                    raise
            except BaseException:
                await connection.close()
                raise

    async def _connect(self) -> ByteStream:
        if self._tls:
            return await anyio.connect_tcp(
                self._host, self._port, ssl_context=ssl.create_default_context(), tls_standard_compatible=False
            )
        return await anyio.connect_tcp(self._host, self._port)


def _json_or_none(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError:
        return None


def _message(reply: Any, status: int) -> str:
    error = reply.get("error", reply) if isinstance(reply, dict) else None
    text = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    return f"HTTP {status}: {str(text or 'no reason given')[:300]}"


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"nothing came for {TIMEOUT:g} s"
    if isinstance(error, anyio.EndOfStream | anyio.IncompleteRead):
        return "it was closed before the reply was complete"
    return str(error) or type(error).__name__
