"""Errors as Anthropic's clients read them, whole and in a stream, and the form of its events.

Runs in request tasks; owns nothing.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

from infer.api.errors import describe
from infer.api.sse import EventStream

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
PING = {"type": "ping"}


def refusal(error: BaseException) -> Response:
    """Anthropic's error body."""
    status, body, headers = _described(error)
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def _described(error: BaseException) -> tuple[int, dict[str, Any], dict[str, str]]:
    status, body, headers = describe(error)
    told = body["error"]
    message, parameter = told["message"], told["param"]
    if parameter and parameter not in message:  # the body has no field for it
        message = f"{parameter}: {message}"
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    written: dict[str, Any] = {"type": kind, "message": message}
    if told["code"] is not None:
        written["details"] = {"error_code": told["code"]}
    return status, {"type": "error", "error": written}, headers


class MessageEvents(EventStream):
    """Events have names, and silence is broken by one, too."""

    async def send(self, event: Any) -> None:
        """One event, or a list of some in one piece."""
        events = event if isinstance(event, list) else [event]
        if events:
            await self.write(b"".join(map(_line, events)))

    async def fail(self, error: BaseException) -> None:
        if not self.ended:
            await self.send(_described(error)[1])
            await self.finish(b"")

    def _sign_of_life(self) -> bytes:
        return _line(PING)


def _line(event: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event))
