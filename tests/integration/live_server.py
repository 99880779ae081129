"""A real server on loopback in a thread of its own, over any engine, with a handle to look inside while clients run.
Used by the client, page and load tests; owns the thread, its event loop and the engine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import anyio
from anyio.from_thread import BlockingPortal, start_blocking_portal

from infer import Engine, EngineConfig
from infer.api import serve
from infer.engine.statistics import EngineStatistics


@dataclass(slots=True)
class LiveServer:
    url: str
    engine: Engine
    portal: BlockingPortal

    def statistics(self) -> EngineStatistics:
        """Asked in the server's own loop."""
        return self.portal.call(self.engine.statistics)

    def wait_for(self, condition: Callable[[EngineStatistics], bool], seconds: float = 20.0) -> EngineStatistics:
        """Poll until the engine is as `condition` says; fails with what it was instead."""
        end = time.monotonic() + seconds
        while True:
            now = self.statistics()
            if condition(now):
                return now
            if time.monotonic() > end:
                raise AssertionError(f"after {seconds} s the engine is still at {now}")
            time.sleep(0.02)


@contextlib.contextmanager
def live_server(
    make_engine: Callable[[EngineConfig], Engine],
    *,
    backend: tuple[str, dict[str, Any]] = ("asyncio", {}),
    **settings: Any,
) -> Iterator[LiveServer]:
    """`settings` are those of `EngineConfig`; the port is free unless stated."""
    settings["api"] = {"port": 0, "drain_seconds": 0.0, **settings.get("api", {})}
    engine = make_engine(EngineConfig(**settings))
    with start_blocking_portal(*backend) as portal:
        running = portal.wrap_async_context_manager(_running(engine))
        url = running.__enter__()
        try:
            yield LiveServer(url, engine, portal)
        finally:
            running.__exit__(None, None, None)  # a failing test is not the server's failure


@contextlib.asynccontextmanager
async def _running(engine: Engine) -> Any:
    stop = anyio.Event()
    async with engine, anyio.create_task_group() as tasks:

        async def run(*, task_status: anyio.abc.TaskStatus[str]) -> None:
            await serve(engine, stop=stop, task_status=task_status)

        try:
            yield await tasks.start(run)
        finally:
            stop.set()
