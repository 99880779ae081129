"""A check, what came of it, and how the checks of one part run: one after the other, none stopped by another.

Runs in the process of a part; owns the event lines it writes.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import IO, Any

Facts = Mapping[str, Any]
"""Numbers and words that belong into the report; JSON."""
Sink = Callable[[dict[str, Any]], None]
MAX_ERROR = 4000


class NotHere(Exception):
    """This machine lacks a tool that a check needs, which is neither a success nor a failure."""


@dataclass(frozen=True, slots=True)
class Check:
    """One promise. `run` raises when it is not kept, and may return facts."""

    name: str
    run: Callable[[], Facts | None]


@dataclass(slots=True)
class Result:
    """What the report says of one check. `passed` None: it did not run, and `error` says why."""

    part: str
    name: str
    passed: bool | None
    seconds: float
    error: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


def run_checks(part: str, checks: Iterable[Check], sink: Sink, *, deadline: float, skip: Collection[str] = ()) -> None:
    """Run them in order. `sink` gets {"event": "start", "name"} before and {"event": "done", **Result} after each. `deadline` is
    a `time.monotonic` after which the rest is told as not run; `skip` are names that an earlier process has answered."""
    stream = iter(checks)
    while True:
        try:
            check = next(stream)
        except StopIteration:
            return
        except Exception:  # what several checks share could not be made
            name = "set-up"
            if name not in skip:
                sink(done(Result(part, name, False, 0.0, last_words())))
            return
        if check.name in skip:
            continue
        sink({"event": "start", "name": check.name})
        sink(done(run_check(part, check, deadline)))


def run_check(part: str, check: Check, deadline: float) -> Result:
    started = time.monotonic()
    if started > deadline:
        return Result(part, check.name, None, 0.0, "the time of this part was used up")
    try:
        facts = dict(check.run() or {})
    except NotHere as absent:
        return Result(part, check.name, None, time.monotonic() - started, str(absent))
    except Exception:
        return Result(part, check.name, False, time.monotonic() - started, last_words())
    return Result(part, check.name, True, time.monotonic() - started, facts=facts)


def done(result: Result) -> dict[str, Any]:
    return {"event": "done", **asdict(result)}


def last_words() -> str:
    """The end of a traceback, where the message is."""
    return traceback.format_exc()[-MAX_ERROR:]


def line_sink(out: IO[str]) -> Sink:
    """One line of JSON per event, on its way at once: what a crash leaves behind."""

    def write(event: dict[str, Any]) -> None:
        out.write(json.dumps(event, default=str) + "\n")
        out.flush()

    return write
