"""What a scheduler counts. Written by it alone, in the loop task."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerStats:
    """Counters since start."""

    steps: int = 0
    scheduled_tokens: int = 0
    draft_tokens: int = 0
    """Of those, output tokens that took no step of their own."""
    preemptions: int = 0
    finished: int = 0
