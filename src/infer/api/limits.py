"""What a request may weigh: reading a body within bounds of size and time, and JSON within bounds of shape.

Runs in request tasks before anything else touches the body.
"""

from __future__ import annotations

from typing import Any

import anyio
import msgspec
from starlette.types import Receive, Scope

from infer.api.errors import ApiError


class ClientGone(Exception):
    """The client went away while its request was being read."""


async def read_body(scope: Scope, receive: Receive, *, max_bytes: int, max_seconds: float) -> bytes:
    """The whole body. Raises `ApiError` 413 or 408, or `ClientGone`."""
    declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
    if declared.isdigit() and len(declared) < 20 and int(declared) > max_bytes:
        raise _too_long(max_bytes)
    parts: list[bytes] = []
    size = 0
    with anyio.move_on_after(max_seconds):
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > max_bytes:
                raise _too_long(max_bytes)
            if not message.get("more_body", False):
                return b"".join(parts)
    raise ApiError(f"the request body did not arrive within {max_seconds:g} s", status=408, code="body_timeout")


def decode_object(data: bytes) -> dict[str, Any]:
    """A JSON object. Raises `ApiError` 400 saying what is wrong with it."""
    if not data.strip():
        raise ApiError("the request body is empty; send a JSON object", code="invalid_json")
    try:
        value = msgspec.json.decode(data)
    except msgspec.MsgspecError as error:
        raise ApiError(f"the request body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise ApiError("the request's JSON is nested too deeply", code="json_too_deep") from None
    if not isinstance(value, dict):
        raise ApiError(f"the request body is JSON of type {type(value).__name__}; send an object", code="invalid_json")
    return value


def _too_long(max_bytes: int) -> ApiError:
    return ApiError(f"the request body is longer than api.max_body_bytes={max_bytes}", status=413, code="body_too_long")
