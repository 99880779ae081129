"""The little of HTTP/1.1 that one PUT needs, byte for byte as the signature expects it. Owns nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import anyio
import anyio.abc

_PIECE = 1 << 18
_MAX_HEAD = 1 << 16
_RETRY_AFTER = re.compile(rb"\r\nretry-after:[ \t]*([0-9]{1,9})[ \t]*(?:\r|$)", re.IGNORECASE)
_STATUS = re.compile(rb"HTTP/1\.[01] ([1-5][0-9][0-9])(?: |\r|$)")


@dataclass(frozen=True, slots=True)
class Reply:
    """What the head of an answer says."""

    status: int
    retry_after: float | None = None
    """Seconds; None: it does not say, or not in seconds."""


class Lost(Exception):
    """The connection failed; whether the server has acted is not known from this alone."""

    def __init__(self, *, timed_out: bool = False) -> None:
        super().__init__()
        self.timed_out = timed_out


async def exchange(stream: anyio.abc.ByteStream, head: bytes, body: bytes, handed_over: Callable[[], None]) -> Reply:
    """Send one request and return the final answer; redirects are not followed and the reply's body is not read.

    `handed_over` is called once the last byte has left. Raises `Lost`.
    """
    view = memoryview(body)
    try:
        await stream.send(head)
        for start in range(0, len(view), _PIECE):
            await stream.send(bytes(view[start : start + _PIECE]))
        handed_over()
    except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
        pass  # a server may refuse before it has read everything: its answer can still be there
    try:
        return await _reply(stream)
    except (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, OSError):
        raise Lost from None


async def _reply(stream: anyio.abc.ByteStream) -> Reply:
    received = b""
    while True:
        head, end, rest = received.partition(b"\r\n\r\n")
        if end:
            match = _STATUS.match(head)
            if match is None or match[1] == b"101":
                raise Lost
            if not match[1].startswith(b"1"):
                wait = _RETRY_AFTER.search(head)
                return Reply(int(match[1]), float(wait[1]) if wait else None)
            received = rest  # 100 or 103: the answer follows
            continue
        if len(received) > _MAX_HEAD:
            raise Lost
        received += await stream.receive()
