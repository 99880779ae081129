"""The record of results and the status page: what a run writes, how runs merge, and how clauses become a row's state."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from integration.documented_code import ROOT
from integration.test_docs_pages import load_tool

SUITE = """
import pytest

@pytest.mark.row("A-ONE", "first clause")
@pytest.mark.row("A-TWO", "shared clause")
@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_passes(loop):
    pass

@pytest.mark.row("A-ONE", clause="second clause")
@pytest.mark.waits("B-LATER")
def test_waits():
    pass

@pytest.mark.row("A-TWO", "broken clause")
def test_fails():
    assert False

@pytest.mark.row("A-TEARDOWN", "clause")
def test_fails_afterwards(breaks):
    pass

@pytest.fixture
def breaks():
    yield
    raise RuntimeError

@pytest.mark.gpu
@pytest.mark.row("A-GPU", "on the device")
def test_device():
    pass
"""
SKIPS = "import pytest\n\ndef test_skips():\n    pytest.skip('no tool here')\n"


def run_suite(directory: Path, source: str, *options: str) -> subprocess.CompletedProcess[str]:
    directory.mkdir(exist_ok=True)
    (directory / "test_suite.py").write_text(source, "utf-8")
    markers = "\n".join(f"    {name}: x" for name in ("row(id, clause)", "waits(row)", "gpu"))
    (directory / "pytest.ini").write_text(f"[pytest]\nmarkers =\n{markers}\npythonpath = {ROOT / 'tests'}\n", "utf-8")
    (directory / "conftest.py").write_text('pytest_plugins = ["results_plugin"]\n', "utf-8")
    # Only the plugins in question: the others take seconds to import.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "xdist.plugin", "-p", "no:cacheprovider", "-m", "not gpu"]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        [*command, *options], cwd=directory, env=environment, capture_output=True, text=True, check=False, timeout=120
    )


@pytest.fixture(scope="module", params=[(), ("-n", "2")], ids=["one process", "two workers"])
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("suite")
    done = run_suite(directory, SUITE, "--results", "out/tests.json", "--results-run", "test", *request.param)
    assert done.returncode == 1, done.stdout
    stored: dict[str, Any] = json.loads((directory / "out" / "tests.json").read_text("utf-8"))
    return stored


def test_a_run_writes_outcomes_and_markers(recorded: dict[str, Any]) -> None:
    tests = recorded["test"]
    outcomes = {name.split("::")[1]: entry["outcome"] for name, entry in tests.items()}
    assert outcomes["test_passes[asyncio]"] == outcomes["test_passes[trio]"] == outcomes["test_waits"] == "passed"
    assert outcomes["test_fails"] == outcomes["test_fails_afterwards"] == "failed"
    assert tests["test_suite.py::test_waits"]["waits"] == ["B-LATER"]
    assert tests["test_suite.py::test_waits"]["rows"] == [["A-ONE", "second clause"]]
    assert tests["test_suite.py::test_passes[trio]"]["rows"] == [["A-ONE", "first clause"], ["A-TWO", "shared clause"]]


def test_deselected_gpu_tests_are_recorded(recorded: dict[str, Any]) -> None:
    device = recorded["test"]["test_suite.py::test_device"]
    assert (device["outcome"], device["rows"], device["gpu"]) == ("not run", [["A-GPU", "on the device"]], True)


def test_runs_merge_and_forget_what_is_gone(tmp_path: Path) -> None:
    run_suite(tmp_path, "def test_old(): pass\n", "--results", "tests.json", "--results-run", "test")
    run_suite(tmp_path, "def test_long(): pass\n", "--results", "tests.json", "--results-run", "heavy")
    run_suite(tmp_path, "def test_new(): pass\n", "--results", "tests.json", "--results-run", "test")
    stored = json.loads((tmp_path / "tests.json").read_text("utf-8"))
    assert {run: list(tests) for run, tests in stored.items()} == {
        "test": ["test_suite.py::test_new"],
        "heavy": ["test_suite.py::test_long"],
    }


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["one process", "worker"])
def test_a_skip_fails_the_run_when_asked(tmp_path: Path, workers: tuple[str, ...]) -> None:
    assert run_suite(tmp_path, SKIPS, *workers).returncode == 0
    done = run_suite(tmp_path, SKIPS, "--fail-on-skip", *workers)
    assert done.returncode == 1
    assert "test_suite.py::test_skips: no tool here" in done.stdout


def test_a_module_skipped_at_import_fails_the_run_too(tmp_path: Path) -> None:
    source = "import pytest\npytest.importorskip('no_such_module')\ndef test_x(): pass\n"
    plain = SKIPS.replace("pytest.skip('no tool here')", "pass")
    (tmp_path / "suite").mkdir()
    (tmp_path / "suite" / "test_other.py").write_text(plain, "utf-8")
    done = run_suite(tmp_path / "suite", source, "--fail-on-skip")
    assert done.returncode == 1, done.stdout
    assert "no_such_module" in done.stdout


@pytest.fixture(scope="module")
def status() -> ModuleType:
    return load_tool("status")


def entry(outcome: str, *rows: tuple[str, str], waits: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"outcome": outcome, "reason": "", "rows": [list(row) for row in rows], "waits": list(waits), "gpu": False}


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([entry("passed", ("R", "a"))], "proven"),
        ([entry("passed", ("R", "a")), entry("failed", ("R", "b"))], "FAILING"),
        ([entry("passed", ("R", "a")), entry("skipped", ("R", "a"))], "FAILING"),
        ([entry("passed", ("R", "a")), entry("xfailed", ("R", "b"))], "FAILING"),
        ([entry("passed", ("R", "a")), entry("passed", ("R", "b"), waits=("LATER",))], "waiting"),
        ([entry("passed", ("R", "a")), entry("not run", ("R", "b"))], "waiting for a GPU run"),
        ([entry("passed", ("R", "a")), entry("not run", ("R", "a"))], "proven"),
        ([entry("not run", ("R", "a"))], "waiting for a GPU run"),
        ([entry("passed", ("OTHER", "a"))], "nothing yet"),
    ],
)
def test_state_of_a_row(status: ModuleType, entries: list[dict[str, Any]], expected: str) -> None:
    tests = {f"test.py::test_{number}": item for number, item in enumerate(entries)}
    clauses = status.clauses_by_row(tests, ["R", "OTHER"])
    assert status.row_state(clauses.get("R", {})) == expected


def test_an_unknown_row_is_refused(status: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"test_0.*'R-TYPO'"):
        status.clauses_by_row({"test.py::test_0": entry("passed", ("R-TYPO", "a"))}, ["R"])


def test_the_page_puts_the_milestone_first_and_counts(status: ModuleType) -> None:
    rows = {name: status.Row(name, "area", milestone, f"{name} does", f"{name} holds") for name, milestone in
            (("LATE", ""), ("EARLY", "engine"), ("NONE", ""))}  # fmt: skip
    tests = {
        "t.py::test_a[asyncio]": entry("passed", ("LATE", "one")),
        "t.py::test_b[asyncio]": entry("passed", ("EARLY", "two")),
        "t.py::test_b[trio]": entry("passed", ("EARLY", "two")),
    }
    page = status.render(rows, status.clauses_by_row(tests, rows))
    assert page.index("### EARLY: proven") < page.index("### LATE: proven") < page.index("* `NONE` NONE does")
    assert page.count("`t.py::test_b`") == 1
    assert "3 capabilities: 2 proven, 0 waiting, 0 FAILING, 0 waiting for a GPU run, 1 nothing yet." in page


def gpu_run(directory: Path, name: str, started: str, passed: bool | None, *, dry_run: bool = False) -> None:
    check = {"part": "trace", "name": "graphs", "passed": passed, "error": "", "rows": [["GPU", "replayed"]]}
    plain = {"part": "ops", "name": "linear", "passed": False, "error": "", "rows": []}
    made = {"started": started, "dry_run": dry_run, "checks": [check, plain]}
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(json.dumps(made), "utf-8")


def test_what_only_a_gpu_shows_is_listed_until_a_run_has_shown_it(status: ModuleType, tmp_path: Path) -> None:
    rows = {name: status.Row(name, "area", "", f"{name} does", f"{name} holds") for name in ("GPU", "CPU")}
    tests = {"t.py::test_a": entry("passed", ("CPU", "one")), "t.py::test_b": entry("not run", ("GPU", "replayed"))}

    def page() -> str:
        return str(status.render(rows, status.clauses_by_row(tests | status.read_gpu_run(tmp_path), rows)))

    assert "## Waiting for a GPU run\n\n* `GPU`: replayed\n" in page()
    gpu_run(tmp_path, "dry.json", "2026-03-01T00:00:00Z", True, dry_run=True)
    assert "### GPU: waiting for a GPU run" in page(), "a dry run proves nothing"
    gpu_run(tmp_path, "b.json", "2026-01-01T00:00:00Z", False)
    assert "### GPU: FAILING" in page()
    gpu_run(tmp_path, "a.json", "2026-02-01T00:00:00Z", True)
    assert "### GPU: proven" in page() and "`docs/gpu/a.json: trace: graphs`" in page()
    assert "## Waiting for a GPU run" not in page()
    gpu_run(tmp_path, "c.json", "2026-02-02T00:00:00Z", None)
    assert "### GPU: waiting for a GPU run" in page(), "the newest run counts"


def test_check_notices_a_page_that_is_not_current(
    status: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "tests.json"
    results.write_text(json.dumps({"test": {"t.py::test_a": entry("passed", ("X-IMPORT", "cheap"))}}), "utf-8")
    monkeypatch.setattr(status, "STATUS", tmp_path / "status.md")
    assert status.main(["--results", str(results), "--check"]) == 1
    assert "+### X-IMPORT: proven" in capsys.readouterr().out
    assert status.main(["--results", str(results)]) == 0
    assert status.main(["--results", str(results), "--check"]) == 0
