"""A line in the log for every ten (option `seconds`) seconds of work: tokens, steps, requests, the KV cache and its hits.

Runs on a thread of its own; owns the counters of its last line.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from infer.errors import ConfigError
from infer.plugins import EngineFacts, StatLoggerSpec, StepSnapshot, hookimpl
from infer.plugins.stat_logger import API_VERSION

NOTHING = StepSnapshot(
    at=0.0,
    step=0,
    running=0,
    waiting=0,
    kv_usage=0.0,
    scheduled_tokens=0,
    prompt_tokens=0,
    cached_tokens=0,
    output_tokens=0,
    finished_requests=0,
    preemptions=0,
)
"""Before the first step."""

logger = logging.getLogger("infer.stats")


class LogLines:
    def __init__(self, facts: EngineFacts) -> None:
        self._model = facts.model
        self._seconds: float = facts.options["seconds"]
        if not 0 < self._seconds < math.inf:
            raise ConfigError(
                f"stat_logger 'log': seconds={self._seconds} between two lines; write a number above 0",
                fields=("plugins.stat_logger_options",),
            )
        self._since = 0.0
        self._said = NOTHING
        self._now = NOTHING

    def record(self, steps: Sequence[StepSnapshot], dropped: int) -> None:
        for step in steps:
            if self._now.step == self._said.step:  # the first one of a line
                self._since = step.at
            self._now = step
            if step.at - self._since >= self._seconds:
                self._say()

    def close(self) -> None:
        if self._now.step > self._said.step:
            self._say()

    def _say(self) -> None:
        before, now = self._said, self._now
        prompt = now.prompt_tokens - before.prompt_tokens
        cached = now.cached_tokens - before.cached_tokens
        logger.info(
            "%s: %d prompt tokens (%.1f %% of them cached) and %d output tokens in %d steps, %.1f s; running %d, waiting %d; "
            "KV cache %.1f %%",
            self._model,
            prompt,
            100 * cached / prompt if prompt else 0.0,
            now.output_tokens - before.output_tokens,
            now.step - before.step,
            max(now.at - self._since, 0.0),
            now.running,
            now.waiting,
            100 * now.kv_usage,
        )
        self._said = now


def create(facts: EngineFacts) -> LogLines:
    return LogLines(facts)


@hookimpl
def infer_stat_loggers() -> list[StatLoggerSpec]:
    return [
        StatLoggerSpec(
            name="log",
            api=API_VERSION,
            factory=f"{__name__}:create",
            example={"options": {"seconds": 0.5}},
            options={"seconds": 10.0},
        )
    ]
