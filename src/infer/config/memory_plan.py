"""What will live in memory, decided before anything is loaded, and the words it is printed in. Plain data."""

from __future__ import annotations

import msgspec

from infer.config.units import format_bytes


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes, as printed before loading. `available` is what the platform reported; `kv_cache` counts the null blocks too."""

    weights: int
    kv_cache: int
    workspace: int
    load_transient: int
    available: int
    capture_steps: int = 0
    """Taps, and the snapshots of the steps in flight."""
    capture_store: int = 0
    """Captured rows kept for reuse with the prefix cache, at most."""

    @property
    def total(self) -> int:
        """Once loaded."""
        return self.weights + self.kv_cache + self.workspace + self.capture_steps + self.capture_store


def format_memory_plan(plan: MemoryPlan) -> str:
    """One line for people, printed before loading."""
    return (
        f"weights {format_bytes(plan.weights)} + KV cache {format_bytes(plan.kv_cache)} + workspace "
        f"{format_bytes(plan.workspace)}{capture_words(plan)} = {format_bytes(plan.total)} of "
        f"{format_bytes(plan.available)} available "
        f"(loading needs {format_bytes(plan.load_transient)} more for a moment)"
    )


def capture_words(plan: MemoryPlan) -> str:
    if not plan.capture_steps:
        return ""
    return f" + captured rows {format_bytes(plan.capture_steps)} in steps and {format_bytes(plan.capture_store)} kept"
