"""What happened to each request and why: waits, preemptions, prefix hits. Kept for running requests and the last ones that ended.

Written by the scheduler in the loop task, read by `Engine.explain`. Owns nothing but the notes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import msgspec

from infer.engine.kv_cache.lineage import PrefixEnd

if TYPE_CHECKING:
    from infer.engine.request import Request

WaitReason = Literal[
    "queued behind others",
    "token budget",
    "no free slot",
    "no free blocks",
    "preemption in this step",
    "token in flight",
    "prompt longer than what is left of the step",
    "too many partial prefills",
    "too many long prefills",
    "the KV store",
]
PreemptReason = Literal["no free blocks", "prefix cache reset", "failed step", "blocks not loaded"]
MAX_NOTES = 32
"""Of one kind for one request; the oldest go first."""
MAX_ENDED = 512
"""Requests that ended and can still be explained."""


class Wait(msgspec.Struct, kw_only=True):
    """Consecutive steps in which a request could not start, for one reason."""

    reason: WaitReason
    first_step: int
    last_step: int
    needed: int = 0
    """Blocks or tokens that it needed, where that was short."""
    free: int = 0
    """And how many there were, those kept back for running requests not counted."""


class Preemption(msgspec.Struct, kw_only=True):
    """The request gave back its blocks and starts over."""

    step: int
    reason: PreemptReason
    by: str | None = None
    """Request whose growth took them; its own id when it was the last in line."""


class Admission(msgspec.Struct):
    """The request took a slot, the first time or again."""

    step: int
    num_tokens: int
    """Known tokens."""
    num_cached: int
    """Of these, taken from the prefix cache."""
    prefix: PrefixEnd


class History:
    """Of one choice of a request."""

    __slots__ = ("added_step", "admissions", "choice_index", "ended", "preemptions", "waits")

    def __init__(self, choice_index: int) -> None:
        self.choice_index = choice_index
        self.added_step = -1
        self.waits: list[Wait] = []
        self.preemptions: list[Preemption] = []
        self.admissions: list[Admission] = []
        self.ended: tuple[int, str] | None = None
        """(step, finish reason)."""

    def wait(self, reason: WaitReason, step: int, needed: int = 0, free: int = 0) -> None:
        last = self.waits[-1] if self.waits else None
        if last is not None and last.reason == reason and last.last_step >= step - 1:
            last.last_step, last.needed, last.free = step, needed, free
            return
        if len(self.waits) == MAX_NOTES:
            del self.waits[0]
        self.waits.append(Wait(reason=reason, first_step=step, last_step=step, needed=needed, free=free))

    def preempted(self, reason: PreemptReason, step: int, by: str | None) -> None:
        if len(self.preemptions) == MAX_NOTES:
            del self.preemptions[0]
        self.preemptions.append(Preemption(step=step, reason=reason, by=by))

    def admitted(self, admission: Admission) -> None:
        if len(self.admissions) == MAX_NOTES:
            del self.admissions[0]
        self.admissions.append(admission)


class Histories:
    """By request id, all choices of a request together."""

    def __init__(self) -> None:
        self._live: dict[str, list[History]] = {}
        self._ended: OrderedDict[str, list[History]] = OrderedDict()

    def begin(self, choices: Iterable[Request], step: int) -> None:
        """A request came; its choices have a history from here on."""
        for request in choices:
            request.history.added_step = step
            self._live.setdefault(request.request_id, []).append(request.history)

    def end(self, request: Request, step: int) -> None:
        """A choice is over; with the last one the request moves to those that ended."""
        request.history.ended = (step, request.finish_reason or "")
        choices = self._live.get(request.request_id)
        if choices is not None and all(choice.ended for choice in choices):
            del self._live[request.request_id]
            self._ended[request.request_id] = choices
            self._ended.move_to_end(request.request_id)
            if len(self._ended) > MAX_ENDED:
                self._ended.popitem(last=False)

    def of(self, request_id: str) -> list[History]:
        return self._live.get(request_id) or self._ended.get(request_id) or []
