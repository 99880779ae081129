"""hypercorn, with repairs: a connection whose client is gone ends now, and what breaks one breaks only that one.

Runs in the server's event loop. Without it every client that hangs up between requests leaves a file and three tasks
behind for `idle_timeout` seconds (hypercorn 0.18; its trio server does not).
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import anyio
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.config import Config
from hypercorn.events import Closed, Event
from hypercorn.utils import wrap_app

from infer.api.errors import unwrap

if TYPE_CHECKING:
    from starlette.types import ASGIApp

logger = logging.getLogger(__name__)

GRACE = 1.0
"""Seconds that the calls of a client that is gone have to notice."""
DIRECT = "infer.direct"
"""Key in the ASGI scope: writes a piece of an HTTP/1.1 response's body at once, or returns False where that cannot be."""
MAX_DIRECT = 2**14
"""Bytes that wait for the client, from which on a writer has to wait, too."""


class DirectBody:
    """A piece of a chunked body, straight to the transport: what hypercorn and h11 do for it takes longer than all that
    infer does for a token. They see the head and the end of the response; in between they keep no state that changes."""

    def __init__(self, app: Any, transport: Any) -> None:
        self._app = app
        self._transport = transport

    async def __call__(self, scope: Any, *more: Any) -> None:
        if scope["type"] == "http" and scope["http_version"] == "1.1" and scope["method"] != "HEAD":
            scope[DIRECT] = self.write
        await self._app(scope, *more)

    def write(self, data: bytes) -> bool:
        """False: nothing was written, because the client is behind or gone."""
        transport = self._transport
        if transport.is_closing() or transport.get_write_buffer_size() > MAX_DIRECT:
            return False
        transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True


class Connection(TCPServer):
    """Does not wait for the next request of a client that has closed its side."""

    _gone = False

    async def run(self) -> None:
        self.app = DirectBody(self.app, self.writer.transport)  # type: ignore[assignment]
        await super().run()

    async def _read_data(self) -> None:
        try:
            await super()._read_data()
        finally:
            self._gone = True
            await self.idle_task.stop()

    async def _close(self) -> None:
        # hypercorn expects resets; a peer that the kernel gave up on (ETIMEDOUT, EHOSTUNREACH) is gone just the same.
        with contextlib.suppress(OSError):
            await super()._close()

    async def _idle_timeout(self) -> None:
        if not self._gone:
            await super()._idle_timeout()


async def serve_on_asyncio(app: ASGIApp, config: Config, shutdown_trigger: Callable[[], Awaitable[None]]) -> None:
    """As `hypercorn.asyncio.serve`."""
    await _serve("hypercorn.asyncio.run", _contained(Connection), app, config, shutdown_trigger)


async def serve_on_trio(app: ASGIApp, config: Config, shutdown_trigger: Callable[[], Awaitable[None]]) -> None:
    """As `hypercorn.trio.serve`."""
    from hypercorn.trio.tcp_server import TCPServer as OnTrio  # noqa: PLC0415 - an asyncio application may not have trio

    await _serve("hypercorn.trio.run", _contained(OnTrio), app, config, shutdown_trigger)


async def _serve(
    name: str, connection: type, app: ASGIApp, config: Config, shutdown_trigger: Callable[[], Awaitable[None]]
) -> None:
    wrapped = wrap_app(app, config.wsgi_max_body_size, "asgi")  # type: ignore[arg-type]
    await _own_copy(name, connection).worker_serve(wrapped, config, shutdown_trigger=shutdown_trigger)


def _contained(server: Any) -> type:
    """A connection whose failure is its own: on trio, what one of them raises would end the whole server.

    And one that ends: a client that is gone leaves replies (HTTP/2) and pipelined requests that would wait for ever.
    """

    class Contained(server):  # type: ignore[misc]
        async def run(self) -> None:
            try:
                with anyio.CancelScope() as self._scope:
                    await super().run()
            except Exception as error:
                logger.info("a connection was dropped: %r", unwrap(error))

        async def _read_data(self) -> None:
            handle = self.protocol.handle

            async def watched(event: Event) -> None:
                if isinstance(event, Closed):
                    self._scope.deadline = anyio.current_time() + GRACE
                await handle(event)

            self.protocol.handle = watched
            await super()._read_data()

    return Contained


def _own_copy(name: str, connection: type) -> ModuleType:
    """The module executed once more for us alone: other users of hypercorn in this process keep theirs as it is."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"no module named {name!r}", name="hypercorn")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.TCPServer = connection  # type: ignore[attr-defined]
    return module
