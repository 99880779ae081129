"""Pytest plugin: `INFER_PLATFORM=reference` runs the tests on that platform, wherever they do not name one themselves.
Runs in the test process; a command `infer` of its own process reads the variable itself. Owns what it left out and why."""

from __future__ import annotations

import os
from collections.abc import Callable, Container
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from infer.plugins.platform import PlatformSpec
    from infer.plugins.registry import Registry

VARIABLE = "INFER_PLATFORM"
Choose = Callable[["Registry", str, Container[str]], "PlatformSpec"]
_KEY = "infer_other_platform"


def pytest_configure(config: pytest.Config) -> None:
    if chosen := os.environ.get(VARIABLE):
        from infer.engine.worker import platforms  # every start of pytest would pay for it

        patch = pytest.MonkeyPatch()
        patch.setattr(platforms, "choose_platform", in_place_of_auto(chosen, platforms.choose_platform))
        config.add_cleanup(patch.undo)
        config.pluginmanager.register(OtherPlatforms(config, chosen), "infer-other-platforms")


def in_place_of_auto(chosen: str, choose: Choose) -> Choose:
    """Real registries take `chosen` for "auto"; a test's own stand-in for one is left alone."""
    from infer.plugins.registry import Registry

    def choose_platform(registry: Registry, name: str, passed_over: Container[str] = ()) -> PlatformSpec:
        return choose(registry, chosen if name == "auto" and isinstance(registry, Registry) else name, passed_over)

    return choose_platform


def about_another(item: pytest.Item, chosen: str) -> str | None:
    """Why a test marked `platform(name, reason)` has nothing to say on the platform `chosen`; None where it has."""
    for mark in item.iter_markers("platform"):
        name, reason = mark.args
        if name != chosen:
            return f"about {name}: {reason}"
    return None


class OtherPlatforms:
    """Leaves out tests of other platforms, and says at the end which and why."""

    def __init__(self, config: pytest.Config, chosen: str) -> None:
        self.config, self.chosen = config, chosen
        self.left_out: dict[str, str] = {}

    def pytest_report_header(self) -> str:
        return f"platform: {self.chosen} where a test does not name one ({VARIABLE})"

    @pytest.hookimpl(trylast=True)  # after -m and -k: what they leave out is not counted here
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        reasons = {item: reason for item in items if (reason := about_another(item, self.chosen))}
        if reasons:
            items[:] = [item for item in items if item not in reasons]
            self.config.hook.pytest_deselected(items=list(reasons))
            self.left_out = {item.nodeid: reason for item, reason in reasons.items()}

    def pytest_sessionfinish(self) -> None:
        if hasattr(self.config, "workeroutput"):  # a worker of xdist: the controller has collected nothing itself
            self.config.workeroutput[_KEY] = self.left_out

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.left_out |= getattr(node, "workeroutput", {}).get(_KEY, {})

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.left_out:
            terminalreporter.section(f"left out with {VARIABLE}={self.chosen}")
            for nodeid, reason in sorted(self.left_out.items()):
                terminalreporter.line(f"{nodeid}: {reason}")
