"""Conformance kits: per kind of plugin, checks that a correct implementation passes and a wrong one does not.

`for check in storage_target.checks(spec, directory): check.run()` under any test runner. Owns nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from infer.plugins.registry import import_reference


@dataclass(frozen=True, slots=True)
class Check:
    """One promise of a contract. `run` raises `AssertionError`, or whatever the plugin raised."""

    name: str
    run: Callable[[], None]


def load(spec: Any, field: str = "factory") -> Any:
    """The object that a field of a spec names."""
    return import_reference(getattr(spec, field))


def expect(condition: object, message: str) -> None:
    """An assertion that also holds under `python -O`."""
    if not condition:
        raise AssertionError(message)
