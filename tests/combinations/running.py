"""Runs one combination: an engine, its requests at once, and the same requests in the plainest engine of the same numbers.
On the calling thread, in an event loop of its own; patches nothing but a counter of replayed steps."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

from combinations import asking, engine_checks, request_checks
from combinations.asking import Ask, Shelved
from combinations.checkpoints import Shelf
from combinations.declared import Row
from infer import Completion, Delta, Engine
from infer.backends.cpu.tape import Tape
from infer.engine.statistics import EngineStatistics
from infer.engine.step import StepPlan

PROBE_TOKENS = 40
LIMIT = 120.0
"""Seconds; only guards against what never ends."""


@dataclass
class Answer:
    """What became of one request."""

    ask: Ask
    done: Completion
    deltas: list[Delta]
    objects: list[bytes]
    """Of its artifact, behind that of its parent."""


@dataclass
class Observed:
    """An engine's life, as seen from outside and from its steps."""

    row: Row
    tmp: Path
    answers: list[Answer] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)
    most_in_flight: int = 0
    replays: int = 0
    log_lines: list[str] = field(default_factory=list)
    cached_again: int = 0
    """Cached tokens of a prompt that comes a second time."""
    cached_outside: int = 0
    """The same, after the cache was emptied."""
    probes: list[Completion] = field(default_factory=list)
    engine: Engine | None = None
    statistics: EngineStatistics | None = None
    facts: dict[str, Any] = field(default_factory=dict)


class Lines(logging.Handler):
    """What a stat logger says."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())


def run(row: Row, requests: Sequence[Row], shelf: Shelf, tmp: Path, seed: int = 0) -> Observed:
    """Raises what the engine or a request refuses, and `AssertionError` for whatever is not as it must be."""

    async def limited() -> Observed:
        with anyio.fail_after(LIMIT):
            return await _run(row, requests, shelf, tmp, seed)

    return anyio.run(limited)


async def _run(row: Row, requests: Sequence[Row], shelf: Shelf, tmp: Path, seed: int) -> Observed:
    asks = [asking.request(one, seed + place) for place, one in enumerate(requests)]
    plain = asking.plain_request()
    if row["pool"] == "tight":
        asks = [*(asking.filler(plain, number) for number in range(asking.FILLERS)), *asks]
    seen = await observe(row, asks, shelf, tmp)
    engine_checks.check(seen)
    exact = row["platform"] == "cpu" and row["numerics"] != "fast"
    async with Engine(asking.engine_config(asking.plain_row(row), shelf, tmp / "plain")) as engine:
        for number, answer in enumerate(seen.answers):
            expected = await answered(engine, answer.ask, salt=f"plain {number}")
            request_checks.check(answer, expected, row, engine, exact=exact)
            if not exact:
                await request_checks.check_ties(answer, expected, row, engine)
    return seen


async def observe(row: Row, asks: Sequence[Ask], shelf: Shelf, tmp: Path) -> Observed:
    """All requests at once, then a probe of the caches."""
    seen = Observed(row, tmp)
    handler = Lines(seen.log_lines)
    logger = logging.getLogger("infer.stats")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    replay = Tape.replay

    def counted(tape: Tape) -> Any:
        seen.replays += 1
        return replay(tape)

    Tape.replay = counted  # type: ignore[method-assign]
    try:
        async with Engine(asking.engine_config(row, shelf, tmp)) as engine:
            watch(engine, seen)
            found: dict[int, Answer] = {}

            async def one(place: int, ask: Ask) -> None:
                found[place] = await answered(engine, ask)

            await together([lambda p=p, a=a: one(p, a) for p, a in enumerate(asks)])  # type: ignore[misc]
            seen.answers = [found[place] for place in range(len(asks))]
            await _probe(engine, seen)
            seen.statistics = engine.statistics()
            seen.facts = engine_checks.facts(engine)
    finally:
        Tape.replay = replay  # type: ignore[method-assign]
        logger.removeHandler(handler)
        logger.setLevel(level)
    return seen


async def together(calls: Sequence[Any]) -> None:
    """The first failure ends the others and is raised as it is."""
    try:
        async with anyio.create_task_group() as tasks:
            for call in calls:
                tasks.start_soon(call)
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


def watch(engine: Engine, seen: Observed) -> None:
    """Every plan that the executor is given, and how many are in its hands."""
    parts: Any = engine._parts
    submit, loop = parts.executor.submit, parts.loop

    def submitted(plan: StepPlan) -> Any:
        seen.plans.append(plan)
        seen.most_in_flight = max(seen.most_in_flight, len(loop._in_flight) + 1)
        return submit(plan)

    parts.executor.submit = submitted


async def answered(engine: Engine, ask: Ask, salt: str | None = None) -> Answer:
    """`salt`: in a plain engine; the request finds nothing in the prefix cache."""
    if salt is not None:
        ask = asking.in_plain_engine(ask)
    sink = Shelved()
    arguments = {**ask.arguments, "artifact": await asking.artifact_request(engine, ask, sink)}
    if salt is not None:
        arguments["cache_salt"] = salt
    deltas: list[Delta] = []
    if ask.row["call"] == "stream":
        async with engine.stream(ask.prompt, ask.params, **arguments) as stream:
            async for delta in stream:
                deltas.append(delta)
        done = stream.result
    else:
        done = await engine.generate(ask.prompt, ask.params, **arguments)
    return Answer(ask, done, deltas, sink.objects)


async def _probe(engine: Engine, seen: Observed) -> None:
    """One prompt three times: computed, from the prefix cache, and from outside after that was emptied."""
    ask = asking.probe(PROBE_TOKENS)
    first = await answered(engine, ask)
    again = await answered(engine, ask)
    seen.cached_again = again.done.usage.cached_tokens
    seen.probes = [first.done, again.done]
    if seen.row["kv connector"] != "none":
        while not await engine.reset_prefix_cache():  # blocks that are on their way out are held
            pass
        outside = await answered(engine, ask)
        seen.cached_outside = outside.done.usage.cached_tokens
        seen.probes.append(outside.done)
