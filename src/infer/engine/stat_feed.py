"""What the loop has counted behind each step, for the statistics loggers that the config names: bounded, off the loop's task.

`step` runs in the loop task; each logger lives on a thread of its own. Owns the steps that no logger has taken yet.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import msgspec

from infer.errors import PluginContractError
from infer.plugins.options import options_of
from infer.plugins.registry import BUILTIN, Registry
from infer.plugins.stat_logger import EngineFacts, StatLogger, StepSnapshot

if TYPE_CHECKING:
    from infer.config.resolve import ResolvedConfig
    from infer.engine.scheduler.scheduler import Scheduler

CAPACITY = 4096
"""Steps kept for a logger that is busy; the oldest go first, and it is told how many."""
INTERVAL = 0.1
"""Seconds that a logger's thread lets steps gather, so that the loop seldom has to wake it."""
CLOSE_SECONDS = 5.0
"""How long the end of an engine waits for a logger."""

logger = logging.getLogger(__name__)


class StatFeed:
    """Hands a snapshot of every step to each logger. Without loggers a step costs one test of an empty list."""

    def __init__(self, scheduler: Scheduler, *, clock: Callable[[], float] = time.time) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._readers: list[LoggerThread] = []
        self._step = 0

    def step(self) -> None:
        """A step has been booked, or has failed."""
        self._step += 1
        if not self._readers:
            return
        scheduler, metrics = self._scheduler, self._scheduler.metrics
        snapshot = StepSnapshot(
            at=self._clock(),
            step=self._step,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv_usage=scheduler.kv.usage(),
            scheduled_tokens=scheduler.stats.scheduled_tokens,
            prompt_tokens=metrics.prompt_tokens,
            cached_tokens=metrics.cached_tokens,
            output_tokens=metrics.output_tokens,
            finished_requests=scheduler.stats.finished,
            preemptions=scheduler.stats.preemptions,
        )
        for reader in self._readers:
            reader.put(snapshot)

    async def open(
        self,
        registry: Registry,
        names: Sequence[str],
        facts: EngineFacts,
        options: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Make the named loggers, each on its thread and with its options. Raises `PluginError`, or `ConfigError` for
        options; then, and when cancelled, all are told to end."""
        try:
            for name in dict.fromkeys(names):
                label = f"stat logger {name!r} of {registry.origin('stat_logger', name)}"
                own = msgspec.structs.replace(facts, options=options_of(registry, "stat_logger", name, options))
                reader = LoggerThread(partial(_made, registry, name, own), label)
                self._readers.append(reader)
                await anyio.to_thread.run_sync(reader.opened, abandon_on_cancel=True)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.aclose(0)
            raise

    async def aclose(self, seconds: float = CLOSE_SECONDS) -> None:
        """Give every logger the rest and close it; one that takes longer is left behind and named."""
        readers, self._readers = self._readers, []
        for reader in readers:
            reader.stop()
        async with anyio.create_task_group() as tasks:
            for reader in readers:
                tasks.start_soon(anyio.to_thread.run_sync, reader.join, seconds)


def engine_facts(model: str, resolved: ResolvedConfig, max_model_len: int) -> EngineFacts:
    return EngineFacts(
        model=model,
        platform=resolved.platform,
        dtype=resolved.dtype,
        max_model_len=max_model_len,
        max_num_seqs=resolved.scheduler.max_num_seqs,
        num_blocks=sum(group.num_blocks for group in resolved.cache.groups),
        block_size=resolved.cache.block_size,
        version=version(BUILTIN),
    )


def _made(registry: Registry, name: str, facts: EngineFacts) -> StatLogger:
    made: StatLogger = registry.create("stat_logger", name, facts)
    missing = [method for method in ("record", "close") if not callable(getattr(made, method, None))]
    if missing:
        raise PluginContractError(
            f"stat_logger {name!r} of {registry.origin('stat_logger', name)}: its factory returned "
            f"{type(made).__name__}, which has no method {missing[0]}",
            plugin=name,
        )
    return made


class LoggerThread:
    """One logger and the steps that wait for it."""

    def __init__(
        self, make: Callable[[], StatLogger], label: str, *, capacity: int = CAPACITY, interval: float = INTERVAL
    ) -> None:
        self._make = make
        self._label = label
        self._interval = interval
        self._steps: deque[StepSnapshot] = deque(maxlen=capacity)
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._opened = threading.Event()
        self._failure: BaseException | None = None
        self._last = 0
        self._complaints: dict[str, int] = {}
        # A logger that never returns must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name=f"infer {label}", daemon=True)
        self._thread.start()

    def put(self, snapshot: StepSnapshot) -> None:
        """In the loop task; never waits."""
        self._steps.append(snapshot)
        if not self._wake.is_set():
            self._wake.set()

    def opened(self) -> None:
        """Wait until the logger is made. Raises what making it raised."""
        self._opened.wait()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """What was put in before is still recorded."""
        self._stopping.set()
        self._wake.set()

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)
        if self._thread.is_alive() and seconds:
            logger.warning("%s does not end; its thread is left behind after %g seconds", self._label, seconds)

    def _run(self) -> None:
        try:
            made = self._make()
        except BaseException as error:  # raised where the engine starts
            self._failure = error
            return
        finally:
            self._opened.set()
        while True:
            self._wake.wait()
            ending = self._stopping.is_set()
            self._wake.clear()
            self._record(made)
            if ending:
                break
            self._stopping.wait(self._interval)
        self._attempt("close", made.close)

    def _record(self, made: StatLogger) -> None:
        steps: list[StepSnapshot] = []
        while self._steps and len(steps) < CAPACITY:
            steps.append(self._steps.popleft())
        if not steps:
            return
        dropped = steps[-1].step - self._last - len(steps)
        self._last = steps[-1].step
        if dropped:
            self._complain("drops", f"is too slow: {dropped} steps were dropped")
        self._attempt("record", lambda: made.record(steps, dropped))

    def _attempt(self, what: str, call: Callable[[], object]) -> None:
        try:
            answer = call()
            if answer is not None:
                close = getattr(answer, "close", None)
                if callable(close):  # a coroutine: it will never run
                    close()
                raise PluginContractError(
                    f"it returned {type(answer).__name__}; {what} is a plain method without a result"
                )
        except (Exception, SystemExit) as error:
            self._complain(what, f"raised {type(error).__name__} in {what}: {error}")

    def _complain(self, what: str, message: str) -> None:
        """The first time, the second, the fourth, the eighth ..."""
        times = self._complaints[what] = self._complaints.get(what, 0) + 1
        if times & (times - 1) == 0:
            logger.warning("%s %s (%d times so far)", self._label, message, times)
