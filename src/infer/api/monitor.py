"""Notices an engine that has work and completes no step, and probes that an idle one did not answer.

A task of the server's; `/health` reads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from infer.engine.engine import Engine

_TICK = 0.25


class HealthMonitor:
    """Watches that steps complete while there is work; one that completes clears whatever was overdue."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._last_step: float | None = None
        self._since: float | None = None
        self._probe_since: float | None = None

    def look(self) -> None:
        """Take notice of the engine's progress; called at least every few hundred milliseconds."""
        if not self._engine.is_alive:
            return
        now, last_step = self._engine.statistics(), self._engine.last_step_at
        if last_step != self._last_step:
            self._last_step, self._since, self._probe_since = last_step, None, None
        if not (now.running or now.waiting):
            self._since = None
        elif self._since is None:
            self._since = anyio.current_time()

    @property
    def stuck_for(self) -> float:
        """Seconds without a step while there was work."""
        return _seconds(self._since)

    @property
    def probe_waits_for(self) -> float:
        """Seconds since a probe was sent that nothing has answered yet, also when its sender has given up."""
        return _seconds(self._probe_since)

    def probe_sent(self) -> None:
        if self._probe_since is None:
            self._probe_since = anyio.current_time()

    def probe_answered(self) -> None:
        self._probe_since = None

    async def watch(self) -> None:
        while True:
            self.look()
            await anyio.sleep(_TICK)


def _seconds(since: float | None) -> float:
    return 0.0 if since is None else anyio.current_time() - since
