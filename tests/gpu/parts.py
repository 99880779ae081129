"""The parts of a run in their order, and the seconds each may take. Imports a part's module only in the process that runs it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpu.checks import Check

if TYPE_CHECKING:
    from gpu.place import Place

Checks = Callable[["Place"], Iterator[Check]]


@dataclass(frozen=True, slots=True)
class Part:
    """A module of this package with a function `checks(place)`."""

    name: str
    module: str
    budget: float
    """Seconds, the start of its process and the compilation of kernels included."""

    def load(self) -> Checks:
        found: Checks = importlib.import_module(f"gpu.{self.module}").checks
        return found


PARTS = (
    Part("machine", "machine", 20),
    Part("sampling", "sampling", 25),
    Part("ops", "ops_kit", 90),
    Part("kernels", "kernel_speed", 85),
    Part("dense engine", "dense_engine", 85),
    Part("sparse engine", "sparse_engine", 85),
    Part("engine speed", "engine_speed", 60),
    Part("memory", "memory", 40),
    Part("trace", "trace", 35),
    Part("models", "model_kit", 60),
    Part("sanitizer", "sanitizer", 110),
)
TOTAL = 475.0
"""Seconds of the whole run, under the eight minutes it promises; what is left over then is told as not run. The budgets add up
to more, for no part takes its own in full unless something is wrong with it."""


def chosen(names: str | None) -> tuple[Part, ...]:
    """The parts of a comma-separated list; all of them without one. Raises `SystemExit` for a name that does not exist."""
    if not names:
        return PARTS
    known = {part.name: part for part in PARTS}
    wanted = [name.strip() for name in names.split(",")]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise SystemExit(f"there is no part {unknown[0]!r}; there are: {', '.join(known)}")
    return tuple(known[name] for name in wanted)
