"""hypercorn on asyncio, with two repairs: a connection whose client is gone ends now, and quietly.

Runs in the server's event loop. Without it every client that hangs up between requests leaves a file and three tasks
behind for `idle_timeout` seconds (hypercorn 0.18; its trio server does not).
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import TYPE_CHECKING

from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.config import Config
from hypercorn.utils import wrap_app

if TYPE_CHECKING:
    from starlette.types import ASGIApp


class Connection(TCPServer):
    """Does not wait for the next request of a client that has closed its side."""

    _gone = False

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
    wrapped = wrap_app(app, config.wsgi_max_body_size, "asgi")  # type: ignore[arg-type]
    await _own_copy("hypercorn.asyncio.run").worker_serve(wrapped, config, shutdown_trigger=shutdown_trigger)


def _own_copy(name: str) -> ModuleType:
    """The module executed once more for us alone: other users of hypercorn in this process keep theirs as it is."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"no module named {name!r}", name="hypercorn")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.TCPServer = Connection  # type: ignore[attr-defined]
    return module
