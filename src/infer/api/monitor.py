"""Notices an engine that has work and completes no step.

A task of the server's; `/health` reads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from infer.engine.engine import Engine

_TICK = 0.25


class HealthMonitor:
    """Watches that steps complete while there is work. `stuck_for` is None while they do."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._steps = -1
        self._since: float | None = None

    def look(self) -> None:
        """Take notice of the engine's progress; called at least every few hundred milliseconds."""
        if not self._engine.is_alive:
            return
        now = self._engine.statistics()
        if now.steps != self._steps or not (now.running or now.waiting):
            self._steps, self._since = now.steps, None
        elif self._since is None:
            self._since = anyio.current_time()

    @property
    def stuck_for(self) -> float:
        """Seconds without a step while there was work."""
        return 0.0 if self._since is None else anyio.current_time() - self._since

    async def watch(self) -> None:
        while True:
            self.look()
            await anyio.sleep(_TICK)
