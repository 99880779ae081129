"""A route and one call of it: key check, body, handler, disconnect watch, and every error in OpenAI's shape.

Runs in the server's request tasks; a call owns its cancel scope.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import anyio
import msgspec
from anyio.abc import TaskGroup
from starlette.datastructures import Headers, QueryParams
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from infer.api.auth import check_key
from infer.api.connections import DIRECT
from infer.api.context import ApiContext
from infer.api.errors import error_response
from infer.api.fields import Body
from infer.api.limits import ClientGone, decode_object, read_body
from infer.api.sse import EventStream

Handler = Callable[["Call"], Awaitable[Response | None]]
"""Answers a call: returns a response, or None after it wrote `call.events()` to its end. Raises typed errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiRoute:
    """One method and path. A POST gets its JSON object as `call.data`."""

    method: str
    path: str
    handler: Handler
    summary: str = ""
    body: Body | None = None
    """The fields its JSON object may have; None: it has none, or checks them itself."""
    optional_body: bool = False
    """An absent body counts as {}."""
    raw_body: bool = False
    """Its body is not JSON; the handler finds it in `call.raw`."""
    public: bool = False
    """Needs no API key."""
    always: bool = False
    """Answers while the server is stopping or full."""
    admin: bool = False
    """There only with api.admin, and only on the admin listener where there is one."""
    monitoring: bool = False
    """On the admin listener, too."""
    endpoint: str = ""
    """The plugin that added it; "" is the server's own."""
    refusal: Callable[[BaseException], Response] = error_response
    """Writes what the client is told when the call fails before its reply has begun."""


class Call:
    """One HTTP request on its way through a handler."""

    def __init__(self, context: ApiContext, route: ApiRoute, scope: Scope, send: Send) -> None:
        self.context = context
        self.route = route
        self.headers = Headers(scope=scope)
        self.query = QueryParams(scope.get("query_string", b""))
        self.path: dict[str, str] = scope.get("path_params", {})
        self.request_id: str = scope["infer.request_id"]
        self.unique_id = self.request_id
        """The request id, made unique among running calls: use it for ids of engine requests."""
        self.data: dict[str, Any] = {}
        self.raw = b""
        self.notices: list[str] = []
        """What the server did otherwise than a reader of the request may think; sent in a response header."""
        self.tasks: TaskGroup
        self.stream: EventStream | None = None
        self.scope = anyio.CancelScope()
        self.failure: Exception | None = None
        self._send = send
        self._direct: Callable[[bytes], bool] | None = scope.get(DIRECT)

    def json(self, value: Any, *, status: int = 200) -> Response:
        return Response(
            msgspec.json.encode(value),
            status_code=status,
            media_type="application/json",
            headers=self._notice_headers(),
        )

    def events(
        self, *, comment: Callable[[], str] = lambda: "keep-alive", kind: type[EventStream] = EventStream
    ) -> EventStream:
        """The event stream that answers this call; its keep-alive runs as long as the handler."""
        settings = self.context.settings
        self.stream = kind(
            self._send,
            self._notice_headers(),
            keep_alive=settings.sse_keep_alive,
            write_timeout=settings.write_timeout,
            comment=comment,
            on_stalled=self.scope.cancel,
            direct=self._direct,
        )
        return self.stream

    async def open_events(
        self, *, comment: Callable[[], str] = lambda: "keep-alive", kind: type[EventStream] = EventStream
    ) -> EventStream:
        """`events()`, started and kept alive."""
        stream = self.events(comment=comment, kind=kind)
        await stream.start()
        self.tasks.start_soon(stream.keep_alive)
        return stream

    def cut_off(self, reason: Exception) -> None:
        """End the handler; the client is told `reason`."""
        self.failure = reason
        self.scope.cancel()

    def _notice_headers(self) -> Mapping[str, str]:
        if not self.notices:
            return {}
        text = "; ".join(dict.fromkeys(self.notices))
        return {"x-infer-notice": "".join(c if " " <= c <= "~" else "?" for c in text)[:2000]}


class Endpoint:
    """ASGI application of one route."""

    def __init__(self, context: ApiContext, route: ApiRoute) -> None:
        self._context = context
        self._route = route
        self.refusal = route.refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call(self._context, self._route, scope, send)
        try:
            if not self._route.public:
                check_key(call.headers, self._context.key_digests)
            with self._context.calls.entered(call):
                await self._read(call, scope, receive)
                response = await self._answer(call, receive)
                if response is not None:
                    await response(scope, receive, send)
                return
        except ClientGone:
            return
        except Exception as error:
            refusal = self._route.refusal(error)
        await refusal(scope, receive, send)

    async def _read(self, call: Call, scope: Scope, receive: Receive) -> None:
        settings = self._context.settings
        data = await read_body(scope, receive, max_bytes=settings.max_body_bytes, max_seconds=settings.body_timeout)
        if self._route.raw_body:
            call.raw = data
        elif self._route.method == "POST" and (data.strip() or not self._route.optional_body):
            call.data = decode_object(data)

    async def _answer(self, call: Call, receive: Receive) -> Response | None:
        """Run the handler until it ends, the client goes away, or the server cuts it off."""
        response: Response | None = None
        async with anyio.create_task_group() as tasks:
            call.tasks = tasks
            tasks.start_soon(_watch, receive, call.scope)
            with call.scope:
                response = await self._handle(call)
            if call.failure is not None:
                response = await _fail(call, call.failure)
            tasks.cancel_scope.cancel()
        return response

    async def _handle(self, call: Call) -> Response | None:
        try:
            return await self._route.handler(call)
        except Exception as error:
            return await _fail(call, error)


async def _fail(call: Call, error: Exception) -> Response | None:
    if call.stream is not None and call.stream.started:
        await call.stream.fail(error)
        return None
    return call.route.refusal(error)


async def _watch(receive: Receive, scope: anyio.CancelScope) -> None:
    """The whole body is in: what comes now is the client's end."""
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
