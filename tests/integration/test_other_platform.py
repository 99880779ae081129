"""The test run on another platform: `INFER_PLATFORM` reaches engines that name none, and what is left out is said."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from infer.config.engine import PluginsSection
from infer.engine.worker.platforms import choose_platform
from infer.plugins.manager import build_registry
from infer.plugins.registry import Registry
from integration.documented_code import ROOT
from platform_plugin import VARIABLE, in_place_of_auto

SUITE = """
import pytest

def test_any():
    pass

@pytest.mark.platform("cpu", "packs weights")
@pytest.mark.parametrize("width", [1, 2])
def test_native(width):
    pass

@pytest.mark.platform("reference", "runs anywhere")
def test_plain():
    pass
"""
NATIVE = [f"test_suite.py::test_native[{width}]: about cpu: packs weights" for width in (1, 2)]
PLAIN = ["test_suite.py::test_plain: about reference: runs anywhere"]


def test_auto_becomes_the_chosen_one_and_a_name_stays() -> None:
    choose, registry = in_place_of_auto("reference", choose_platform), build_registry(PluginsSection())
    assert choose_platform(registry, "auto", ()).name != "reference"
    assert choose(registry, "auto", ()).name == "reference"
    assert choose(registry, "cpu", ()).name == "cpu"


def test_a_stand_in_for_a_registry_is_left_alone() -> None:
    asked: list[str] = []

    def record(registry: Registry, name: str, passed_over: Any) -> Any:
        asked.append(name)

    in_place_of_auto("reference", record)(cast("Registry", object()), "auto", ())
    assert asked == ["auto"]


@pytest.mark.parametrize(
    ("chosen", "workers", "left_out"),
    [("reference", "0", NATIVE), ("reference", "1", NATIVE), ("cpu", "0", PLAIN), ("", "0", [])],
)
def test_tests_of_other_platforms_are_left_out_by_name(
    tmp_path: Path, chosen: str, workers: str, left_out: list[str]
) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE, "utf-8")
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["results_plugin", "platform_plugin"]\n', "utf-8")
    marker = "platform(name, reason): x"
    (tmp_path / "pytest.ini").write_text(f"[pytest]\nmarkers = {marker}\npythonpath = {ROOT / 'tests'}\n", "utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "xdist.plugin", "-p", "no:cacheprovider", "--fail-on-skip"]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", VARIABLE: chosen}
    done = subprocess.run(
        [*command, "-n", workers],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0 and f" {4 - len(left_out)} passed" in done.stdout, done.stdout
    assert [line for line in done.stdout.splitlines() if ": about " in line] == left_out
    assert (f"platform: {chosen} where a test does not name one" in done.stdout) == bool(chosen)
