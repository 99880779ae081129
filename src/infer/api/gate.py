"""The outermost application: request ids, CORS, the access log, and a clean end for requests refused half read.

Runs in every request's task before routing; owns nothing.
"""

from __future__ import annotations

import logging
import re
import time
import uuid

import anyio
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infer.api.auth import PREFLIGHT_HEADERS, origin_headers
from infer.api.errors import ApiError, error_response

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
REQUEST_ID_HEADERS = ("x-request-id", "request-id")
"""OpenAI's name in replies, and Anthropic's."""
LINGER = 5.0
"""Seconds to read on after refusing a request, so that a client still sending sees the reply and not a reset."""


class Gate:
    def __init__(self, app: ASGIApp, cors_origins: tuple[str, ...]) -> None:
        self._app = app
        self._cors_origins = cors_origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:  # there are no websockets here
            await send({"type": "websocket.close", "code": 1000})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        stated = headers.get("x-request-id", "")
        scope["infer.request_id"] = stated if _REQUEST_ID.fullmatch(stated) else uuid.uuid4().hex
        exchange = _Exchange(scope, receive, send)
        try:
            _check_framing(headers)
            exchange.headers |= origin_headers(scope["method"], headers, self._cors_origins)
        except ApiError as error:
            await error_response(error)(scope, exchange.receive, exchange.send)
            return
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            asked = headers.get("access-control-request-headers", "")
            preflight = {**PREFLIGHT_HEADERS, "access-control-allow-headers": asked}
            await Response(status_code=204, headers=preflight)(scope, exchange.receive, exchange.send)
            return
        try:
            await self._app(scope, exchange.receive, exchange.send)
        finally:
            exchange.log()


def _check_framing(headers: Headers) -> None:
    """Two lengths of one body: a proxy in front may believe the other one and see a second request in it."""
    if "transfer-encoding" in headers and "content-length" in headers:
        raise ApiError("content-length and transfer-encoding exclude each other", headers={"connection": "close"})


class _Exchange:
    """One request and its response, watched from outside."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers = {name: str(scope["infer.request_id"]) for name in REQUEST_ID_HEADERS}
        self._scope = scope
        self._receive = receive
        self._send = send
        self._read = False
        self._status = 0
        self._began = time.monotonic()

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            self._read = True
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            MutableHeaders(raw=message["headers"]).update(self.headers)
        elif not self._read and not message.get("more_body", False):
            await self._linger(message)
            return
        await self._send(message)

    async def _linger(self, last: Message) -> None:
        """The reply is ready while the client still sends. Ending now would reset the connection under it, and a full
        queue of unread body would block the server's own clean-up: send the reply, then read on for a while."""
        await self._send({**last, "more_body": True})
        with anyio.move_on_after(LINGER):
            while not self._read:
                await self.receive()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._discard)
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
            tasks.cancel_scope.cancel()

    async def _discard(self) -> None:
        while not self._read:
            await self.receive()

    def log(self) -> None:
        if logger.isEnabledFor(logging.INFO):
            logger.info(
                "%s %s %s %.3f s %s",
                self._scope["method"],
                self._scope["path"],
                self._status or "client gone",
                time.monotonic() - self._began,
                self._scope["infer.request_id"],
            )


async def _lifespan(receive: Receive, send: Send) -> None:
    """Nothing to do: the engine belongs to whoever calls `serve`."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
