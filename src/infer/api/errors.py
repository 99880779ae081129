"""From typed errors to HTTP: status, OpenAI's error body, headers. The only place that knows both.

Pure; runs in request tasks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from infer.errors import (
    ArtifactError,
    ArtifactRefusedError,
    ContextLengthError,
    EngineClosedError,
    EngineDeadError,
    EngineError,
    InferError,
    InvalidRequestError,
    QueueFullError,
    RequestError,
    SamplingError,
    StepError,
    StorageError,
)

logger = logging.getLogger(__name__)

MAX_MESSAGE = 1000


class ApiError(RequestError):
    """A refusal that only HTTP knows, such as a missing key or a body that is too long."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | None = None,
        parameter: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.parameter = parameter
        self.headers = dict(headers or {})


_STATUS: tuple[tuple[type[Exception], int, str | None], ...] = (
    (ContextLengthError, 400, "context_length_exceeded"),
    (InvalidRequestError, 400, None),
    (QueueFullError, 429, "queue_full"),
    (RequestError, 400, None),
    (ArtifactRefusedError, 400, None),
    (ArtifactError, 500, None),
    (EngineDeadError, 503, "engine_dead"),
    (EngineClosedError, 503, "engine_closed"),
    (SamplingError, 500, "sampling_failed"),
    (StepError, 500, "step_failed"),
    (EngineError, 500, "engine_error"),
    (InferError, 500, None),
    (RecursionError, 400, "json_too_deep"),
)
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def unwrap(error: BaseException) -> BaseException:
    """The first real failure inside exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def describe(error: BaseException) -> tuple[int, dict[str, Any], dict[str, str]]:
    """(status, error body, headers). A failure that is no `InferError` is a defect: logged, and named by type only."""
    error = unwrap(error)
    if isinstance(error, ApiError):
        return error.status, _body(str(error), error.status, error.parameter, error.code), error.headers
    status, code = next(((s, c) for kind, s, c in _STATUS if isinstance(error, kind)), (500, "internal_error"))
    if isinstance(error, ArtifactError | StorageError):
        code = error.code
    if isinstance(error, ArtifactError):
        status = 503 if error.retry_after is not None else status
    after = error.retry_after if isinstance(error, QueueFullError | ArtifactError) else None
    headers = {} if after is None else {"retry-after": str(max(1, math.ceil(after)))}
    if isinstance(error, RecursionError):
        message = "the request's JSON is nested too deeply"
    elif isinstance(error, InferError):
        message = str(error)
    else:
        logger.error("a request met a defect", exc_info=error)
        message = f"internal error ({type(error).__name__}); the server's log has the details"
    return status, _body(message, status, getattr(error, "parameter", None), code), headers


def error_response(error: BaseException) -> Response:
    status, body, headers = describe(error)
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json", headers=headers)


def _body(message: str, status: int, parameter: str | None, code: str | None) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    if len(message) > MAX_MESSAGE:
        message = message[:MAX_MESSAGE] + "..."
    # A message may quote what the client sent; lone surrogates cannot be sent back.
    message = message.encode("utf-8", "replace").decode()
    return {"error": {"message": message, "type": kind, "param": parameter, "code": code}}
