"""The outbox between the loop and one request's reader: merges what a slow reader has not fetched; the loop never waits.

Written by the loop task, read by the request's task, both on one event loop.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from infer.errors import EngineError

if TYPE_CHECKING:
    from infer.engine.request import Request
    from infer.engine.step import PositionLogprobs
    from infer.types import FinishReason


STEP_SECONDS = 0.001
"""No real step is shorter; a scripted one may be."""


@dataclass(slots=True)
class ChoiceUpdate:
    """What one choice gained since the last fetch."""

    choice_index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: Exception | None = None


class Outbox:
    """Updates of all choices of one request. `interval` output tokens (or an end) make a choice worth fetching."""

    def __init__(self, interval: int = 1) -> None:
        self._interval = interval
        self._updates: dict[int, ChoiceUpdate] = {}
        self._ready = False
        self._reader: anyio.Event | None = None
        self._event_class: type[anyio.Event] | None = None
        self._in_step = True

    def put(
        self,
        request: Request,
        token_ids: Sequence[int] = (),
        logprobs: Sequence[PositionLogprobs] | None = None,
        prompt_logprobs: Sequence[PositionLogprobs] = (),
    ) -> None:
        """Add to the choice's update and wake the reader when it is worth it. Never waits."""
        index = request.choice_index
        update = self._updates.get(index)
        if update is None:
            update = self._updates[index] = ChoiceUpdate(index)
        update.token_ids += token_ids
        if logprobs:
            update.logprobs += logprobs
        if prompt_logprobs:
            update.prompt_logprobs += prompt_logprobs
        if request.finish_reason is not None:
            update.finish_reason = request.finish_reason
            update.stop_reason = request.stop_reason
            update.error = request.error
        elif len(update.token_ids) < self._interval:
            return
        self._ready = True
        if self._reader is not None:
            self._reader.set()

    def prompt_logprobs_left(self) -> list[PositionLogprobs]:
        """Those not fetched yet: other choices may be due before the one that carries them."""
        return [entry for update in self._updates.values() for entry in update.prompt_logprobs]

    async def take(self) -> list[ChoiceUpdate]:
        """Wait until some choice has `interval` tokens or has ended; returns the updates that are due. One reader."""
        if self._reader is not None:
            raise EngineError("another task is reading this request already; a stream has one reader")
        # A reader that is woken again and again in step with the loop would never see that it is cancelled; one that
        # waits for real steps is found waiting.
        if self._ready or self._in_step:
            await anyio.lowlevel.checkpoint_if_cancelled()
        while not self._ready:
            # The class is that of the running event loop, which `anyio.Event()` looks up each time.
            self._reader = self._event_class() if self._event_class is not None else anyio.Event()
            self._event_class = type(self._reader)
            began = time.monotonic()
            try:
                await self._reader.wait()
            finally:
                self._reader = None
            self._in_step = time.monotonic() - began < STEP_SECONDS
        self._ready = False
        due = [u for u in self._updates.values() if u.finish_reason is not None or len(u.token_ids) >= self._interval]
        for update in due:
            del self._updates[update.choice_index]
        return due
