"""Server-sent events: one stream to one client, with keep-alive comments while it is silent.

Runs in the call's task, the keep-alive beside it. Owns the response once it has started.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import anyio
import msgspec
from starlette.types import Send

from infer.api.errors import describe

DONE = b"data: [DONE]\n\n"
MEDIA_TYPE = "text/event-stream; charset=utf-8"


class EventStream:
    """`await start()`, then `send` objects, then `finish` (or `fail`). Writing waits for the client: backpressure.

    comment: what a keep-alive says; a client ignores it. on_stalled: called when the client has not read for
    `write_timeout` seconds. direct: writes a piece of the body at once, or returns False where it has to wait.
    """

    def __init__(
        self,
        send: Send,
        headers: Mapping[str, str],
        *,
        keep_alive: float,
        write_timeout: float,
        comment: Callable[[], str] = lambda: "keep-alive",
        on_stalled: Callable[[], None] = lambda: None,
        media_type: str = MEDIA_TYPE,
        direct: Callable[[bytes], bool] | None = None,
    ) -> None:
        self.started = False
        self.ended = False
        self._send = send
        self._headers = {
            "content-type": media_type,
            "cache-control": "no-cache",
            "x-accel-buffering": "no",  # proxies would hold tokens back
            **headers,
        }
        self._keep_alive = keep_alive
        self._write_timeout = write_timeout
        self._comment = comment
        self._on_stalled = on_stalled
        self._direct = direct
        self._lock = anyio.Lock(fast_acquire=True)  # nearly always free: a turn of the event loop per token is dear
        self._last_write = time.monotonic()
        self._writing_since: float | None = None

    async def start(self) -> None:
        self.started = True
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in self._headers.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def send(self, event: Any) -> None:
        """One JSON event."""
        await self.write(b"data: " + msgspec.json.encode(event) + b"\n\n")

    async def write(self, data: bytes) -> None:
        if self._direct is not None and self._writing_since is None and self._direct(data):
            self._last_write = time.monotonic()
            return
        async with self._lock:
            self._writing_since = self._last_write = time.monotonic()
            try:
                await self._send({"type": "http.response.body", "body": data, "more_body": True})
            finally:
                self._writing_since = None

    async def finish(self, last: bytes = DONE) -> None:
        """The end marker, and the end of the response."""
        if not self.ended:
            self.ended = True
            async with self._lock:
                await self._send({"type": "http.response.body", "body": last, "more_body": False})

    async def fail(self, error: BaseException) -> None:
        """An error event and the end marker: a client never sees a silent cut."""
        if not self.ended:
            await self.send(describe(error)[1])
            await self.finish()

    async def keep_alive(self) -> None:
        """Runs beside the stream until cancelled."""
        while True:
            await anyio.sleep(min(self._keep_alive, self._write_timeout))
            now = time.monotonic()
            if self._writing_since is not None:
                if now - self._writing_since >= self._write_timeout:
                    self._on_stalled()
            elif not self.ended and now - self._last_write >= self._keep_alive * 0.9:
                await self.write(self._sign_of_life())

    def _sign_of_life(self) -> bytes:
        return f": {self._comment()}\n\n".encode()


class EventFrame:
    """Events of one stream, alike but for their choices: what never changes is encoded once."""

    def __init__(self, head: Mapping[str, Any]) -> None:
        self._before = b"data: " + msgspec.json.encode(head)[:-1] + b',"choices":['

    def event(self, choice: Mapping[str, Any], more: Mapping[str, Any]) -> bytes:
        """`{**head, "choices": [choice], **more}`, as `EventStream.write` takes it."""
        end = b"]," + msgspec.json.encode(more)[1:] + b"\n\n" if more else b"]}\n\n"
        return self._before + msgspec.json.encode(choice) + end
