"""What the tests of the kits share: a place to plant a wrong plugin, and the checks that fail over it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import pytest

from infer.config.engine import PluginsSection
from infer.plugins import Registry, build_registry
from infer.testing.kits import Check

PlantBug = Callable[..., str]


@pytest.fixture
def plant_bug(monkeypatch: pytest.MonkeyPatch) -> PlantBug:
    """`plant_bug(factory)` makes it importable and returns its "module:attr"."""

    def put(made: Any, name: str = "make") -> str:
        module = sys.modules.get("planted_bugs_here") or ModuleType("planted_bugs_here")
        setattr(module, name, made)
        monkeypatch.setitem(sys.modules, "planted_bugs_here", module)
        return f"planted_bugs_here:{name}"

    return put


@pytest.fixture(scope="module")
def registry() -> Registry:
    """The built-in plugins."""
    return build_registry(PluginsSection(allow=()))


def failures(checks: Iterable[Check]) -> set[str]:
    """Names of the checks that fail, without the variant in brackets."""
    failed = set()
    for check in checks:
        try:
            check.run()
        except Exception:
            failed.add(check.name.partition("[")[0])
    return failed
