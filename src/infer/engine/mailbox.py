"""Where request tasks leave work for the loop: new requests, ends, and calls to make between two steps.

Same event loop on both sides, so plain lists do; the loop drains them before it schedules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import anyio

from infer.engine.request import Request
from infer.types import FinishReason

T = TypeVar("T")


class Mailbox:
    """`post_*` never waits; `wait` returns once something was posted."""

    def __init__(self) -> None:
        self.arrivals: list[Request] = []
        self.ends: list[tuple[Request, FinishReason, int | str | None]] = []
        self.calls: list[Callable[[], None]] = []
        self._wake: anyio.Event | None = None

    def post_request(self, request: Request) -> None:
        self.arrivals.append(request)
        self.wake()

    def post_end(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Ask that a request end; one that has ended already is left alone."""
        self.ends.append((request, reason, stop_reason))
        self.wake()

    def post_call(self, call: Callable[[], None]) -> None:
        """Run `call` in the loop task before the next step is scheduled."""
        self.calls.append(call)
        self.wake()

    async def ask(self, call: Callable[[], T]) -> T:
        """Run `call` like `post_call`, and wait for what it returns."""
        answered = anyio.Event()
        answer: list[T] = []

        def answering() -> None:
            answer.append(call())
            answered.set()

        self.post_call(answering)
        await answered.wait()
        return answer[0]

    def wake(self) -> None:
        if self._wake is not None:
            self._wake.set()

    @property
    def is_empty(self) -> bool:
        return not (self.arrivals or self.ends or self.calls)

    async def wait(self) -> None:
        if not self.is_empty:
            return
        self._wake = anyio.Event()
        try:
            await self._wake.wait()
        finally:
            self._wake = None
