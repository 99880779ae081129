"""Lines of a batch in OpenAI's format: each is one request to a route of this server, answered by that route's own handler.

Runs in the task of whoever runs the batch. Used by `infer batch` and by `/v1/batches`; owns nothing.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import anyio
import msgspec
from starlette.types import Message

from infer.api.context import ApiContext
from infer.api.errors import unwrap
from infer.api.openai import chat, completions
from infer.api.routing import Endpoint
from infer.errors import EngineClosedError

TOPICS = (chat.routes, completions.routes)
RETRY_SECONDS = 0.2
"""A full queue is no answer: the line waits for its turn."""
_NO_ANSWER = ("engine_dead", "engine_closed", "shutting_down")
"""Codes that say nothing about the line."""
Row = dict[str, Any]
"""One line of the output."""


@dataclass(frozen=True, slots=True)
class Line:
    number: int
    """From 1."""
    data: bytes


class BatchLines:
    """Answers lines over an open engine. No key is asked for: whoever may run the batch may run its lines."""

    def __init__(self, context: ApiContext, url: str | None = None) -> None:
        """`url`: the only route that the lines may name; None: any that a batch can reach."""
        inner = replace(context, key_digests=())
        routes = [route for topic in TOPICS for route in topic(context)]
        self._endpoints = {route.path: Endpoint(inner, route) for route in routes if url in (None, route.path)}
        self._seen: set[str] = set()

    @staticmethod
    def urls(context: ApiContext) -> list[str]:
        """Routes that a batch can reach."""
        return [route.path for topic in TOPICS for route in topic(context)]

    async def answer(self, line: Line) -> Row:
        """The output of one line. Never raises for what the line holds; `EngineClosedError` when nothing is answered any
        more, so that the line can have its turn another time."""
        custom_id: str | None = None
        try:
            asked = _decoded(line)
            custom_id = asked["custom_id"] if isinstance(asked.get("custom_id"), str) else None
            endpoint, url, body = self._checked(asked)
        except _BadLine as bad:
            return _row(line, custom_id, error=(bad.code, str(bad)))
        if custom_id is not None:
            self._seen.add(custom_id)
        while True:
            status, request_id, reply = await _call(endpoint, url, body)
            said = reply.get("error", {}) if status >= 400 and isinstance(reply, dict) else {}
            if said.get("code") in _NO_ANSWER:
                raise EngineClosedError(f"line {line.number} could not be answered: {said.get('message', status)}")
            if status != 429:
                break
            await anyio.sleep(RETRY_SECONDS)
        error = None
        if status >= 400:
            error = str(said.get("code") or said.get("type") or status), str(said.get("message", ""))
        response = {"status_code": status, "request_id": request_id, "body": reply}
        return _row(line, custom_id, response=response, error=error)

    def seen(self, custom_id: str | None) -> None:
        """This id was answered before (of a batch that is resumed)."""
        if custom_id is not None:
            self._seen.add(custom_id)

    def _checked(self, asked: Mapping[str, Any]) -> tuple[Endpoint, str, Mapping[str, Any]]:
        custom_id, url, body = asked.get("custom_id"), asked.get("url"), asked.get("body")
        if not isinstance(custom_id, str) or not custom_id:
            raise _BadLine("invalid_custom_id", f"custom_id is {custom_id!r:.100}; every line needs a text of its own")
        if custom_id in self._seen:
            raise _BadLine("duplicate_custom_id", f"custom_id {custom_id[:100]!r} was used by a line before")
        if asked.get("method") != "POST":
            raise _BadLine("invalid_method", f"method is {asked.get('method')!r:.100}; lines are POST requests")
        endpoint = self._endpoints.get(url) if isinstance(url, str) else None
        if endpoint is None or not isinstance(url, str):
            known = ", ".join(self._endpoints)
            raise _BadLine("invalid_url", f"url is {url!r:.100}; lines of this batch can ask {known}")
        if not isinstance(body, dict):
            raise _BadLine("invalid_body", "body is not a JSON object")
        if body.get("stream"):
            raise _BadLine("invalid_body", "stream=true does not apply to a batch: its lines are whole answers")
        unknown = sorted(set(asked) - {"custom_id", "method", "url", "body"})
        if unknown:
            raise _BadLine("unknown_field", f"unknown field {unknown[0][:100]!r}")
        return endpoint, url, body


async def answer_all(
    lines: Iterable[Line], answer: Callable[[Line], Awaitable[Row]], write: Callable[[Row], None], concurrency: int
) -> None:
    """Answer every line, at most `concurrency` at a time, and write each row when it is there. Takes lines as it needs
    them, so that a long file is never in memory. The first failure ends the others and is raised."""
    left = iter(lines)

    async def work() -> None:
        for line in left:
            write(await answer(line))

    try:
        async with anyio.create_task_group() as tasks:
            for _ in range(concurrency):
                tasks.start_soon(work)
    except BaseExceptionGroup as group:
        raise unwrap(group) from group


def row_id(number: int) -> str:
    """Of the output of line `number`: what is there already can be told from the output alone."""
    return f"batch_req_{number}"


class _BadLine(Exception):
    """A line that is no request."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def _decoded(line: Line) -> dict[str, Any]:
    try:
        asked = msgspec.json.decode(line.data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _BadLine("invalid_json_line", f"line {line.number} is not valid JSON: {error}") from None
    if not isinstance(asked, dict):
        raise _BadLine("invalid_json_line", f"line {line.number} is JSON of type {type(asked).__name__}, not an object")
    return asked


def _row(
    line: Line, custom_id: str | None, *, response: Row | None = None, error: tuple[str, str] | None = None
) -> Row:
    return {
        "id": row_id(line.number),
        "custom_id": custom_id,
        "response": response,
        "error": None if error is None else {"code": error[0], "message": error[1]},
    }


async def _call(endpoint: Endpoint, url: str, body: Mapping[str, Any]) -> tuple[int, str, Any]:
    """(status, request id, JSON of the reply): the route answers as it answers a client."""
    request_id = uuid.uuid4().hex
    data = msgspec.json.encode(body)
    incoming: list[Message] = [{"type": "http.request", "body": data, "more_body": False}]
    sent: list[Message] = []

    async def receive() -> Message:
        while not incoming:  # this client never goes away
            await anyio.sleep_forever()
        return incoming.pop()

    async def send(message: Message) -> None:
        sent.append(message)

    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": url,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())],
        "infer.request_id": request_id,
    }
    await endpoint(scope, receive, send)
    status = next(message["status"] for message in sent if message["type"] == "http.response.start")
    reply = b"".join(message.get("body", b"") for message in sent if message["type"] == "http.response.body")
    return status, request_id, msgspec.json.decode(reply)
