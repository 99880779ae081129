"""A statistics logger: one line when the engine ends, with the most requests at once and the tokens per second.

On a thread of its own, one logger per engine; owns its counters.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from infer.plugins import EngineFacts, StatLoggerSpec, StepSnapshot, hookimpl

logger = logging.getLogger("infer_my_name")


class Summary:
    def __init__(self, facts: EngineFacts) -> None:
        self._model = facts.model
        self._first: StepSnapshot | None = None
        self._last: StepSnapshot | None = None
        self._most_running = 0

    def record(self, steps: Sequence[StepSnapshot], dropped: int) -> None:
        self._first = self._first or steps[0]
        self._last = steps[-1]
        self._most_running = max(self._most_running, *(step.running for step in steps))

    def close(self) -> None:
        if self._first is None or self._last is None:
            return  # no step was made
        tokens = self._last.output_tokens - self._first.output_tokens
        seconds = max(self._last.at - self._first.at, 1e-9)  # the clock may have been set back
        logger.info(
            "%s: %d output tokens, %.1f a second, at most %d requests at once",
            *(self._model, tokens, tokens / seconds, self._most_running),
        )


@hookimpl
def infer_stat_loggers() -> list[StatLoggerSpec]:
    return [StatLoggerSpec(name="my-name", api=1, factory=f"{__name__}:Summary", example={})]
