"""A line in the log every ten seconds of work: tokens per second, requests, the KV cache and its hits.

Runs on a thread of its own; owns the counters of its last line.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from infer.plugins import EngineFacts, StatLoggerSpec, StepSnapshot, hookimpl
from infer.plugins.stat_logger import API_VERSION

SECONDS = 10.0

logger = logging.getLogger("infer.stats")


class LogLines:
    def __init__(self, facts: EngineFacts) -> None:
        self._model = facts.model
        self._said: StepSnapshot | None = None
        self._now: StepSnapshot | None = None

    def record(self, steps: Sequence[StepSnapshot], dropped: int) -> None:
        for step in steps:
            self._now = step
            if self._said is None:
                self._said = step
            elif step.at - self._said.at >= SECONDS:
                self._say(self._said, step)

    def close(self) -> None:
        if self._said is not None and self._now is not None and self._now.step > self._said.step:
            self._say(self._said, self._now)

    def _say(self, before: StepSnapshot, now: StepSnapshot) -> None:
        seconds = max(now.at - before.at, 1e-9)
        prompt = now.prompt_tokens - before.prompt_tokens
        logger.info(
            "%s: prompt %.1f tokens/s, output %.1f tokens/s, %d steps; running %d, waiting %d; KV cache %.1f %%, "
            "from the prefix cache %.1f %%",
            self._model,
            prompt / seconds,
            (now.output_tokens - before.output_tokens) / seconds,
            now.step - before.step,
            now.running,
            now.waiting,
            100 * now.kv_usage,
            100 * (now.cached_tokens - before.cached_tokens) / prompt if prompt else 0.0,
        )
        self._said = now


def create(facts: EngineFacts) -> LogLines:
    return LogLines(facts)


@hookimpl
def infer_stat_loggers() -> list[StatLoggerSpec]:
    return [StatLoggerSpec(name="log", api=API_VERSION, factory=f"{__name__}:create", example={})]
