"""Serves the API of an open engine with hypercorn, inside the caller's task group, until told to stop.

Leaves signals, loggers and the event loop as they are. Owns the listeners and the order of stopping.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import anyio
from anyio.abc import TaskStatus
from hypercorn.config import Config

from infer.api.app import TOPICS, Topic, build_admin_app, build_app, build_context
from infer.api.connections import serve_on_asyncio, serve_on_trio
from infer.api.errors import unwrap
from infer.api.listener import BACKLOG, Listener, open_admin_listener, open_listener
from infer.config.engine import ApiSection
from infer.engine.engine import Engine

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from infer.api.context import ApiContext
    from infer.api.openai.responses.store import ResponseStore

GRACE = 2.0
"""Seconds that connections have to close once all requests have ended or were cut off."""


async def serve(
    engine: Engine,
    settings: ApiSection | None = None,
    *,
    topics: Sequence[Topic] = TOPICS,
    stop: anyio.Event | None = None,
    listener: Listener | None = None,
    admin_listener: Listener | None = None,
    responses: ResponseStore | None = None,
    task_status: TaskStatus[str] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """`address = await task_group.start(serve, engine)`; clients can connect from then on.

    `settings` default to `engine.config.api`. Setting `stop` ends it gently: new requests are refused and running ones
    have `drain_seconds`. Cancelling it ends it at once: running requests get an error event, connections are closed.
    Listeners that are not given are opened as the settings say; `responses` is that of `build_context`.
    """
    context = build_context(engine, settings, responses=responses)
    with ExitStack() as stack:
        listener = stack.enter_context(listener or open_listener(context.settings))
        served = [(listener, build_app(context, topics))]
        admin_listener = admin_listener or open_admin_listener(context.settings)
        if admin_listener is not None:
            served.append((stack.enter_context(admin_listener), build_admin_app(context, topics)))
        for one, _ in served:
            one.listen(context.settings.write_timeout)
        try:
            await _serve(context, served, stop or anyio.Event(), task_status)
        except BaseExceptionGroup as group:
            raise unwrap(group) from group


async def _serve(
    context: ApiContext, served: Sequence[tuple[Listener, ASGIApp]], stop: anyio.Event, task_status: TaskStatus[str]
) -> None:
    close, closed = anyio.Event(), anyio.Event()
    connections = anyio.CancelScope(shield=True)  # hypercorn does not survive being cancelled: it is told to close

    async def run_hypercorn() -> None:
        with connections:
            async with anyio.create_task_group() as servers:
                for listener, app in served:
                    servers.start_soon(one_hypercorn, app, _hypercorn_config(context.settings, listener.hand_over()))
        closed.set()

    async def one_hypercorn(app: ASGIApp, config: Config) -> None:
        try:
            await _hypercorn_serve(app, config, close)
        except asyncio.InvalidStateError:
            if not connections.cancel_called:
                raise

    async with anyio.create_task_group() as tasks:
        context.background = tasks
        tasks.start_soon(context.health.watch)
        tasks.start_soon(run_hypercorn)
        task_status.started(served[0][0].address)
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
