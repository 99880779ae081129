"""Why a request waited, was preempted, or found no more of its prompt in the cache: `Engine.explain`.

Made on demand from the scheduler's notes. Owns nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import msgspec

from infer.engine.history import Admission, History, Preemption, Wait
from infer.engine.request import Status
from infer.errors import InvalidRequestError, shown

if TYPE_CHECKING:
    from infer.engine.scheduler.scheduler import Scheduler


class ChoiceExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of a request. Steps are those of the engine, counted from 0."""

    choice_index: int
    status: Literal["waiting", "running", "finished"]
    added_step: int
    """The step that was next when it came."""
    queue_position: int | None
    """How many requests are before it now; None: it does not wait."""
    waits: tuple[Wait, ...]
    """While it was next in line. Before that it waited behind others."""
    admissions: tuple[Admission, ...]
    """When it started, the first time and after each preemption, and what the prefix cache gave."""
    preemptions: tuple[Preemption, ...]
    ended_step: int | None
    finish_reason: str | None


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """`str()` of it is for people."""

    request_id: str
    step: int
    """The next step of the engine."""
    choices: tuple[ChoiceExplanation, ...]

    def __str__(self) -> str:
        lines = [f"request {self.request_id!r}, as of step {self.step}"]
        for choice in self.choices:
            if len(self.choices) > 1:
                lines.append(f"choice {choice.choice_index}:")
            lines += [f"  {line}" for line in _told(choice)]
        return "\n".join(lines)


def explain(scheduler: Scheduler, request_id: str) -> Explanation:
    """Raises `InvalidRequestError` for a request that is not among the running ones and the last that ended."""
    histories = scheduler.histories.of(request_id)
    if not histories:
        raise InvalidRequestError(
            f"no request {shown(request_id)} is known: it never came, or ended before the last ones that are remembered",
            parameter="request_id",
            value=request_id,
        )
    places = {id(request.history): place for place, request in enumerate(scheduler.waiting)}
    running = {id(request.history) for request in scheduler.running if request.status is Status.RUNNING}
    choices = tuple(_choice(history, places.get(id(history)), id(history) in running) for history in histories)
    return Explanation(request_id=request_id, step=scheduler.next_step_id, choices=choices)


def _choice(history: History, place: int | None, runs: bool) -> ChoiceExplanation:
    step, reason = history.ended or (None, None)
    return ChoiceExplanation(
        choice_index=history.choice_index,
        status="finished" if history.ended else "running" if runs else "waiting",
        added_step=history.added_step,
        queue_position=None if history.ended else place,
        waits=tuple(msgspec.structs.replace(wait) for wait in history.waits),
        admissions=tuple(history.admissions),
        preemptions=tuple(history.preemptions),
        ended_step=step,
        finish_reason=reason,
    )


def _told(choice: ChoiceExplanation) -> Iterator[str]:
    """In the order in which it happened."""
    events: list[tuple[int, int, str]] = [(choice.added_step, 0, f"step {choice.added_step}: queued")]
    for wait in choice.waits:
        span = (
            f"step {wait.first_step}"
            if wait.first_step == wait.last_step
            else f"steps {wait.first_step} to {wait.last_step}"
        )
        short = f" (needed {wait.needed}, free {wait.free})" if wait.needed else ""
        events.append((wait.first_step, 1, f"{span}: waited: {wait.reason}{short}"))
    events += [(one.step, 2, f"step {one.step}: started with {_cached(one)}") for one in choice.admissions]
    for loss in choice.preemptions:
        by = f", for request {loss.by!r}" if loss.by else ""
        events.append((loss.step, 3, f"step {loss.step}: preempted: {loss.reason}{by}"))
    if choice.ended_step is not None:
        events.append((choice.ended_step, 4, f"before step {choice.ended_step}: ended, {choice.finish_reason}"))
    elif choice.queue_position is not None:
        events.append((2**62, 4, f"now: waiting, {choice.queue_position} before it"))
    yield from (text for *_, text in sorted(events))


def _cached(one: Admission) -> str:
    text = f"{one.num_cached} of {one.num_tokens} tokens from the prefix cache"
    end = one.prefix
    at = "" if end.token is None else f" at token {end.token}"
    there = "" if end.cached_id is None else f" (id {end.cached_id} there)"
    reason = {
        "complete": "all that can be reused",
        "other token": f"what is cached goes on otherwise{at}{there}",
        "other salt": "the same tokens are cached under another cache_salt",
        "never computed": f"nothing behind it was ever computed{at}",
        "evicted": f"what was there was evicted{at}",
        "reset": f"the prefix cache was reset{at}",
        "window": f"a sliding window's blocks are gone{at}",
        "captured rows missing": f"the captured rows that belong to it are gone{at}",
        "prompt logprobs": "prompt log-probabilities need every token computed",
        "caching off": "prefix caching is off",
        "shared prompt": "computed by another choice of the same request",
    }[end.cause]
    return f"{text}: {reason}"
