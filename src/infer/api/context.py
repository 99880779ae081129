"""What every route may use: the engine, the server's settings, the names of the model, and the calls in progress.

One per server; made by `app.build_context`. Owns the register of running calls.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio

from infer.api.errors import ApiError
from infer.api.monitor import HealthMonitor
from infer.errors import QueueFullError

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from infer.api.answers import AnswerFormats
    from infer.api.openai.responses.store import ResponseStore
    from infer.api.routing import ApiRoute, Call
    from infer.config.engine import ApiSection
    from infer.engine.engine import Engine


class CallRegister:
    """The calls in progress. Stopping: first `drain` (refuse new ones), then `cut_off` what is left."""

    def __init__(self, limit: int) -> None:
        self.draining = False
        self._limit = limit
        self._calls: dict[str, Call] = {}
        self._empty: anyio.Event | None = None

    def __len__(self) -> int:
        return len(self._calls)

    @contextmanager
    def entered(self, call: Call) -> Iterator[None]:
        """Count a call while it runs; refuse it when the server is stopping or full."""
        if not call.route.always:
            if self.draining:
                raise shutting_down()
            if len(self._calls) >= self._limit:
                raise QueueFullError(
                    f"{len(self._calls)} requests are in progress and api.max_concurrent_requests={self._limit}; "
                    "retry later",
                    retry_after=1.0,
                )
        if call.unique_id in self._calls:  # the client, or a proxy, used its id twice
            call.unique_id = f"{call.request_id}-{uuid.uuid4().hex[:8]}"
        self._calls[call.unique_id] = call
        try:
            yield
        finally:
            del self._calls[call.unique_id]
            if not self._calls and self._empty is not None:
                self._empty.set()

    async def drained(self) -> None:
        """Return once no call is in progress."""
        if self._calls:
            self._empty = anyio.Event()
            await self._empty.wait()

    def cut_off(self) -> None:
        """End every call with an error its client can read."""
        for call in list(self._calls.values()):
            call.cut_off(shutting_down())


def shutting_down() -> ApiError:
    return ApiError(
        "the server is shutting down; retry elsewhere or later",
        status=503,
        code="shutting_down",
        headers={"retry-after": "5"},
    )


@dataclass(slots=True, kw_only=True)
class ApiContext:
    """Handed to `routes(context)` of every topic module and, as `call.context`, to every handler."""

    engine: Engine
    settings: ApiSection
    model_names: tuple[str, ...]
    """Names a request may use, the first in replies."""
    key_digests: tuple[bytes, ...]
    calls: CallRegister
    health: HealthMonitor
    answers: AnswerFormats
    responses: ResponseStore | None = None
    """Where responses of /v1/responses are kept; None: nowhere."""
    endpoint_routes: list[ApiRoute] = field(default_factory=list)
    """Of the endpoint plugins that api.endpoints names."""
    endpoint_outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(endpoint, "answered", "refused", "failed" or "cut_off") -> calls."""
    background: TaskGroup | None = None
    """Tasks that outlive the call that starts them, in a server that has some; they end with it."""
    created: int = field(default_factory=lambda: int(time.time()))
    _token_texts: dict[int, str] = field(default_factory=dict)

    @property
    def model_name(self) -> str:
        return self.model_names[0]

    def token_text(self, token_id: int) -> str:
        """One token's own text, special tokens included; U+FFFD where it is no whole character."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self.engine.tokenizer.decode([token_id], skip_special_tokens=False)
            self._token_texts[token_id] = text
        return text
