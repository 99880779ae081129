"""Serves the API of an open engine with hypercorn, inside the caller's task group, until told to stop.

Leaves signals, loggers and the event loop as they are. Owns the listener and the order of stopping.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import anyio
from anyio.abc import TaskStatus
from hypercorn.config import Config

from infer.api.app import TOPICS, Topic, build_app, build_context
from infer.api.connections import serve_on_asyncio, serve_on_trio
from infer.api.errors import unwrap
from infer.api.listener import BACKLOG, Listener, open_listener
from infer.config.engine import ApiSection
from infer.engine.engine import Engine

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from infer.api.context import ApiContext

GRACE = 2.0
"""Seconds that connections have to close once all requests have ended or were cut off."""


async def serve(
    engine: Engine,
    settings: ApiSection | None = None,
    *,
    topics: Sequence[Topic] = TOPICS,
    stop: anyio.Event | None = None,
    listener: Listener | None = None,
    task_status: TaskStatus[str] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """`address = await task_group.start(serve, engine)`; clients can connect from then on.

    `settings` default to `engine.config.api`. Setting `stop` ends it gently: new requests are refused and running ones
    have `drain_seconds`. Cancelling it ends it at once: running requests get an error event, connections are closed.
    """
    context = build_context(engine, settings)
    listener = listener if listener is not None else open_listener(context.settings)
    try:
        listener.listen(context.settings.write_timeout)
        await _serve(context, build_app(context, topics), listener, stop or anyio.Event(), task_status)
    except BaseExceptionGroup as group:
        raise unwrap(group) from group
    finally:
        listener.close()


async def _serve(
    context: ApiContext, app: ASGIApp, listener: Listener, stop: anyio.Event, task_status: TaskStatus[str]
) -> None:
    config = _hypercorn_config(context.settings, listener.hand_over())
    close, closed = anyio.Event(), anyio.Event()
    connections = anyio.CancelScope(shield=True)  # hypercorn does not survive being cancelled: it is told to close

    async def run_hypercorn() -> None:
        with connections:
            try:
                await _hypercorn_serve(app, config, close)
            except asyncio.InvalidStateError:
                if not connections.cancel_called:
                    raise
        closed.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(context.health.watch)
        tasks.start_soon(run_hypercorn)
        task_status.started(listener.address)
        try:
            await stop.wait()
            context.calls.draining = True
            with anyio.move_on_after(context.settings.drain_seconds):
                await context.calls.drained()
        finally:
            context.calls.draining = True
            context.calls.cut_off()
            close.set()
            with anyio.CancelScope(shield=True), anyio.move_on_after(GRACE + 1):
                await closed.wait()
            connections.cancel()
            tasks.cancel_scope.cancel()


async def _hypercorn_serve(app: ASGIApp, config: Config, close: anyio.Event) -> None:
    """hypercorn for the event loop we run on."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        await serve_on_trio(app, config, close.wait)
    else:
        await serve_on_asyncio(app, config, close.wait)


def _hypercorn_config(settings: ApiSection, fd: int) -> Config:
    config = Config()
    config.bind = [f"fd://{fd}"]
    config.backlog = BACKLOG
    config.errorlog = logging.getLogger("infer.api.http")
    config.accesslog = None
    config.include_server_header = False
    config.keep_alive_timeout = settings.idle_timeout
    config.keep_alive_max_requests = 1_000_000
    config.h11_max_incomplete_size = settings.max_header_bytes
    config.h2_max_header_list_size = settings.max_header_bytes
    config.h2_max_concurrent_streams = 1024
    config.graceful_timeout = GRACE
    config.certfile, config.keyfile = settings.tls_cert, settings.tls_key
    return config
