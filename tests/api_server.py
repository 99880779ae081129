"""Servers over a scripted engine, for tests: as an ASGI application in process, or on a loopback port."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx2
from anyio.from_thread import start_blocking_portal

from infer.api import build_app, build_context, serve
from infer.api.app import TOPICS
from infer.api.context import ApiContext, CallRegister
from infer.api.routing import ApiRoute
from infer.config.engine import ApiSection, EngineConfig
from infer.engine.engine import Engine
from infer.testing.fake_engine import fake_engine, scripted
from infer.testing.fake_executor import FakeWorker, NextToken

MODEL = "fake-model"
HELLO = "Hello, wörld! ✓"


@dataclass(kw_only=True)
class Server:
    engine: Engine
    worker: FakeWorker
    address: str = ""
    stop: anyio.Event = field(default_factory=anyio.Event)
    contexts: list[ApiContext] = field(default_factory=list)

    @property
    def calls(self) -> CallRegister:
        return self.contexts[0].calls

    @property
    def url(self) -> str:
        return self.address + "/v1"

    @property
    def where(self) -> tuple[str, int]:
        host, port = self.address.rpartition("//")[2].rsplit(":", 1)
        return host, int(port)


def api_settings(**values: Any) -> ApiSection:
    return ApiSection(**{"port": 0, "served_model_names": (MODEL, "alias"), **values})


@asynccontextmanager
async def open_engine(next_token: NextToken | None = None, **fake: Any) -> AsyncIterator[tuple[Engine, FakeWorker]]:
    workers: list[FakeWorker] = []
    config = fake.pop("config", EngineConfig(cache={"num_blocks": 4096}))
    async with fake_engine(next_token or scripted(HELLO), config, on_worker=workers.append, **fake) as engine:
        yield engine, workers[0]


@asynccontextmanager
async def in_process(
    next_token: NextToken | None = None, *, settings: dict[str, Any] | None = None, **fake: Any
) -> AsyncIterator[tuple[httpx2.AsyncClient, Server]]:
    """A client that calls the application without a socket. Replies arrive whole."""
    async with open_engine(next_token, **fake) as (engine, worker):
        context = build_context(engine, api_settings(**(settings or {})))
        transport = httpx2.ASGITransport(build_app(context))
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
            yield client, Server(engine=engine, worker=worker, contexts=[context])


@asynccontextmanager
async def on_loopback(
    next_token: NextToken | None = None, *, settings: dict[str, Any] | None = None, **fake: Any
) -> AsyncIterator[Server]:
    """A server in the test's own event loop."""
    async with open_engine(next_token, **fake) as (engine, worker), anyio.create_task_group() as tasks:
        server = Server(engine=engine, worker=worker)

        def watched(context: ApiContext) -> list[ApiRoute]:
            server.contexts.append(context)
            return []

        async def run(*, task_status: Any) -> None:
            chosen = api_settings(**(settings or {}))
            await serve(engine, chosen, topics=(*TOPICS, watched), stop=server.stop, task_status=task_status)

        server.address = await tasks.start(run)
        yield server
        tasks.cancel_scope.cancel()


@contextmanager
def in_thread(next_token: NextToken | None = None, **options: Any) -> Iterator[Server]:
    """A server in a thread with an event loop of its own, for blocking clients."""
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(on_loopback(next_token, **options)) as s:
        yield s


def events(text: str) -> list[str]:
    """The data of each server-sent event, in order."""
    return [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Poll: the condition is about another task, often of another thread."""
    with anyio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110
            await anyio.sleep(0.005)
