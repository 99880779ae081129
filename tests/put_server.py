"""A small HTTP server for uploads: keeps the raw bytes it got, and misbehaves as a test asks. Threads, so any loop will do.

Used by the tests of storage; owns its socket and threads until it is closed.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import anyio

Behaviour = Callable[["Exchange"], None]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


@dataclass
class Exchange:
    """One connection: what came, and the socket to answer on."""

    server: PutServer
    socket: socket.socket
    head: bytes
    body: bytes

    @property
    def request_line(self) -> str:
        return self.head.split(b"\r\n")[0].decode()

    @property
    def headers(self) -> dict[str, str]:
        pairs = (line.split(b": ", 1) for line in self.head.split(b"\r\n")[1:] if line)
        return {name.decode(): value.decode() for name, value in pairs}

    @property
    def path(self) -> str:
        return self.request_line.split(" ")[1]

    def create(self) -> bool:
        """Store unless something is there."""
        with self.server.lock:
            if self.path in self.server.objects:
                return False
            self.server.objects[self.path] = self.body
            self.server.metadata[self.path] = {k: v for k, v in self.headers.items() if k.startswith("x-amz-meta-")}
            return True


@dataclass
class PutServer:
    """Stores objects like S3 does with If-None-Match; `script` holds behaviours for the first connections."""

    script: list[Behaviour] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    metadata: dict[str, dict[str, str]] = field(default_factory=dict)
    accepted: int = 0
    port: int = 0
    stop: threading.Event = field(default_factory=threading.Event)

    @property
    def authority(self) -> str:
        return f"127.0.0.1:{self.port}"

    def url(self, path: str = "/object") -> str:
        return f"http://{self.authority}{path}"


def normal(exchange: Exchange) -> None:
    """PUT creates or answers 412; GET and HEAD read; DELETE removes."""
    method = exchange.request_line.split(" ")[0]
    held = exchange.server.objects.get(exchange.path)
    if method == "PUT":
        exchange.socket.sendall(OK if exchange.create() else status(412))
    elif held is None:
        exchange.socket.sendall(status(404))
    elif method == "DELETE":
        del exchange.server.objects[exchange.path]
        exchange.socket.sendall(status(204))
    else:
        head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(held)}\r\nlast-modified: Fri, 15 Jan 2027 08:00:00 GMT\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in exchange.server.metadata[exchange.path].items())
        exchange.socket.sendall((head + "connection: close\r\n\r\n").encode() + (held if method == "GET" else b""))


def answer(data: bytes) -> Behaviour:
    return lambda exchange: exchange.socket.sendall(data)


def status(code: int, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {code} Something", *headers, "content-length: 0", "", ""]
    return "\r\n".join(lines).encode()


def store_and_drop(exchange: Exchange) -> None:
    exchange.create()


def drop(exchange: Exchange) -> None:
    """Close without a word."""


def silent(exchange: Exchange) -> None:
    """Wait until the client gives up."""
    with contextlib.suppress(OSError):
        exchange.socket.settimeout(20)
        exchange.socket.recv(1)


def stalled(exchange: Exchange) -> None:
    """Read nothing and say nothing."""
    exchange.server.stop.wait(20)


async def reached(server: PutServer, count: int = 1) -> None:
    """Wait until so many requests have arrived whole."""
    while len(server.exchanges) < count:  # noqa: ASYNC110  the server is a thread
        await anyio.sleep(0.01)


@contextlib.contextmanager
def put_server(*script: Behaviour, tls: ssl.SSLContext | None = None, read_body: bool = True) -> Iterator[PutServer]:
    server = PutServer(list(script))
    listener = socket.create_server(("127.0.0.1", 0))
    server.port = listener.getsockname()[1]
    threads: list[threading.Thread] = []
    connections: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connections.append(connection)
            thread = threading.Thread(target=_handle, args=(server, connection, tls, read_body), daemon=True)
            threads.append(thread)
            thread.start()

    acceptor = threading.Thread(target=serve, daemon=True)
    acceptor.start()
    try:
        yield server
    finally:
        server.stop.set()
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in (acceptor, *threads):
            thread.join(10)


def _handle(server: PutServer, connection: socket.socket, tls: ssl.SSLContext | None, read_body: bool) -> None:
    with server.lock:
        number, server.accepted = server.accepted, server.accepted + 1
    try:
        stream = connection if tls is None else tls.wrap_socket(connection, server_side=True)
        with stream:
            head, body = _read(stream, read_body)
            exchange = Exchange(server, stream, head, body)
            with server.lock:
                server.exchanges.append(exchange)
            (server.script[number] if number < len(server.script) else normal)(exchange)
    except OSError:
        connection.close()


def _read(stream: socket.socket, read_body: bool) -> tuple[bytes, bytes]:
    received = b""
    while b"\r\n\r\n" not in received:
        piece = stream.recv(65_536)
        if not piece:
            raise OSError("closed")
        received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    if not read_body:
        return head, b""
    lines = head.lower().split(b"\r\n")
    if b"expect: 100-continue" in lines:
        stream.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    length = next((int(line[16:]) for line in lines if line.startswith(b"content-length: ")), 0)
    pieces = [body]
    missing = length - len(body)
    while missing > 0:
        piece = stream.recv(65_536)
        if not piece:
            raise OSError("closed")
        pieces.append(piece)
        missing -= len(piece)
    return head, b"".join(pieces)
