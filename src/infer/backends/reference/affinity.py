"""The CPUs that the worker's thread runs on, and all threads that it starts from then on. Worker thread; owns nothing."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

from infer.errors import ConfigError


def run_on(cpus: Sequence[int] | None) -> Callable[[], None]:
    """Confine the calling thread -> a function that, called by the same thread, undoes it. None: no change.

    Raises `ConfigError` for CPUs that this process may not use.
    """
    if cpus is None:
        return lambda: None
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError(
            "platform.cpus: this system does not let threads choose their CPUs", fields=("platform.cpus",)
        )
    before = os.sched_getaffinity(0)
    foreign = sorted(set(cpus) - before)
    if foreign:
        raise ConfigError(
            f"platform.cpus names {', '.join(map(str, foreign))}; this process may use {_ranges(sorted(before))}",
            fields=("platform.cpus",),
        )
    os.sched_setaffinity(0, cpus)
    thread = threading.get_native_id()

    def let_go() -> None:
        if threading.get_native_id() == thread:  # never another thread, which may be the application's
            os.sched_setaffinity(0, before)

    return let_go


def _ranges(cpus: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5"."""
    parts: list[list[int]] = []
    for cpu in cpus:
        if parts and parts[-1][1] == cpu - 1:
            parts[-1][1] = cpu
        else:
            parts.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
