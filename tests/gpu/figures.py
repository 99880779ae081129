"""A measured figure, its ceiling, and what it must reach. Pure; `docs/gpu.md` gives the reasons for the targets."""

from __future__ import annotations

from typing import Any


def figure(
    value: float,
    unit: str,
    *,
    ceiling: float | None = None,
    target: float | None = None,
    judged: bool = True,
    **more: Any,
) -> dict[str, Any]:
    """The facts of a check that measures. `target` is a share of the ceiling, both in `unit`; not `judged`:
    nobody asks whether it was reached, because what ran was no GPU."""
    share = None if ceiling is None else value / ceiling
    reached = None if share is None or target is None or not judged else share >= target
    return {
        "value": value,
        "unit": unit,
        "ceiling": ceiling,
        "share": share,
        "target": target,
        "reached": reached,
        **more,
    }
