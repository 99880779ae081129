"""Conformance of a statistics logger: it takes whatever an engine may count, stands beside others, and leaves nothing behind.

On threads that are started and ended here; owns nothing.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from infer.plugins.options import declaration_problem, plugin_options
from infer.plugins.stat_logger import EngineFacts, StatLogger, StatLoggerSpec, StepSnapshot
from infer.testing.kits import Check, expect, load

SECONDS = 60.0
"""How long one call may take here before it counts as hanging."""


def checks(spec: StatLoggerSpec) -> Iterator[Check]:
    """Options in the spec's example are given to it over its defaults."""
    for body in (
        _options,
        _steps,
        _idle_engine,
        _large_numbers,
        _gaps,
        _restart_of_the_clock,
        _no_steps,
        _two_engines,
        _nothing_left,
    ):
        yield Check(body.__name__.strip("_"), partial(_in_a_thread, partial(body, spec)))


def facts(model: str = "kit", options: dict[str, Any] | None = None) -> EngineFacts:
    return EngineFacts(
        model=model,
        platform="cpu",
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=8,
        num_blocks=64,
        block_size=16,
        version="0",
        options=options or {},
    )


def snapshot(step: int, **values: float) -> StepSnapshot:
    """A busy engine behind its step of that number."""
    counts = {"running": 1 + step % 3, "waiting": step % 2, "scheduled_tokens": 8 * step, "prompt_tokens": 5 * step}
    counts |= {
        "cached_tokens": step,
        "output_tokens": 3 * step,
        "finished_requests": step // 4,
        "preemptions": step // 9,
    }
    whole = {"step": step, "at": 1e9 + step / 50, "kv_usage": 0.1, **counts, **values}
    return StepSnapshot(**whole)  # type: ignore[arg-type]


_MEASURED = {"step", "at"}
IDLE = dict.fromkeys((name for name in StepSnapshot.__struct_fields__ if name not in _MEASURED), 0)


def _in_a_thread(body: Callable[[], None]) -> None:
    """As in an engine: not on the main thread, and one that hangs is left behind."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            body()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SECONDS)
    expect(not thread.is_alive(), f"a call has not returned for {SECONDS:g} seconds")
    for failure in failures:
        raise failure


def _made(spec: StatLoggerSpec, model: str = "kit", defaults: bool = False) -> StatLogger:
    given = {} if defaults else spec.example.get("options", {})
    made: StatLogger = load(spec)(facts(model, plugin_options("it", spec.options, given, "example")))
    return made


def _record(made: StatLogger, steps: list[StepSnapshot], dropped: int = 0) -> None:
    given = list(steps)
    answer: object = made.record(steps, dropped)  # type: ignore[func-returns-value]
    _nothing(answer, "record")
    expect(steps == given, "record() changes the list that it is given")


def _close(made: StatLogger) -> None:
    _nothing(made.close(), "close")  # type: ignore[func-returns-value]


def _nothing(answer: object, what: str) -> None:
    if answer is not None:
        close = getattr(answer, "close", None)
        if callable(close):
            close()
        raise AssertionError(
            f"{what}() returns {type(answer).__name__}; it must be a plain method that returns nothing"
        )


def _options(spec: StatLoggerSpec) -> None:
    """They are declared as plain data, and the defaults alone will do."""
    expect(not declaration_problem(spec.options), declaration_problem(spec.options))
    made = _made(spec, defaults=True)
    _record(made, [snapshot(1), snapshot(2)])
    _close(made)


def _steps(spec: StatLoggerSpec) -> None:
    """One at a time, many at once, then the end."""
    made = _made(spec)
    for step in range(1, 5):
        _record(made, [snapshot(step)])
    _record(made, [snapshot(step) for step in range(5, 2005)])
    _close(made)


def _idle_engine(spec: StatLoggerSpec) -> None:
    """A step that computed nothing, and one at the same moment: what divides by a count or by a time must not."""
    made = _made(spec)
    _record(made, [snapshot(1, at=1e9, **IDLE)])
    _record(made, [snapshot(2, at=1e9, **IDLE), snapshot(3, at=1e9 + 60, **IDLE)])
    _close(made)


def _large_numbers(spec: StatLoggerSpec) -> None:
    made, much = _made(spec), dict.fromkeys(IDLE, 2**60) | {"kv_usage": 1.0}
    _record(made, [snapshot(2**60, at=4e9, **much)])
    _close(made)


def _gaps(spec: StatLoggerSpec) -> None:
    """It was too slow, and is told how much it missed."""
    made = _made(spec)
    _record(made, [snapshot(7)], 6)
    _record(made, [snapshot(5000), snapshot(5001)], 4992)
    _close(made)


def _restart_of_the_clock(spec: StatLoggerSpec) -> None:
    """The machine's clock may be set back between two steps."""
    made = _made(spec)
    _record(made, [snapshot(1, at=2e9), snapshot(2, at=1e9), snapshot(3, at=2e9 + 60)])
    _close(made)


def _no_steps(spec: StatLoggerSpec) -> None:
    """An engine that was started and left."""
    _close(_made(spec))


def _two_engines(spec: StatLoggerSpec) -> None:
    """Each has its own logger; the end of one is not the end of the other."""
    one, two = _made(spec, "one"), _made(spec, "two")
    expect(one is not two, "the factory returns one object for two engines")
    _record(one, [snapshot(1), snapshot(2)])
    _record(two, [snapshot(1, at=5e8)])
    _close(one)
    _record(two, [snapshot(2, at=5e8 + 60)])
    _close(two)


def _nothing_left(spec: StatLoggerSpec) -> None:
    """Threads have ended, and the process is as it was."""
    root = logging.getLogger()
    before = (root.level, list(root.handlers), sys.stdout, sys.stderr, threading.excepthook)
    threads = {*threading.enumerate()}
    made = _made(spec)
    _record(made, [snapshot(1)])
    _close(made)
    after = (root.level, list(root.handlers), sys.stdout, sys.stderr, threading.excepthook)
    expect(after == before, "the root logger, the standard streams or the hook of threads are not what they were")
    left = [thread.name for thread in {*threading.enumerate()} - threads if thread.is_alive()]
    expect(not left, f"close() leaves threads behind: {left}")
