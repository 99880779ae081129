"""Pytest plugin: writes what each test proved (`row`, `waits`) to a JSON file, and turns skips into failures on request.
Runs in the test process. Owns results/tests.json; `tools/status.py` reads it."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

_KEY = "infer_acceptance"
_SEVERITY = {"passed": 0, "xfailed": 1, "skipped": 2, "failed": 3}
_NO_MARKS: dict[str, Any] = {"rows": [], "waits": [], "gpu": False}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("acceptance results")
    group.addoption("--results", metavar="FILE", type=Path, help="merge the outcome of every test into this JSON file")
    group.addoption(
        "--results-run", metavar="NAME", default="test", help="name of this run; replaces its earlier entries"
    )
    group.addoption("--fail-on-skip", action="store_true", help="a skipped test fails the run, unless it is marked gpu")


def pytest_configure(config: pytest.Config) -> None:
    # Under xdist the controller sees every report, and only the workers collect and deselect.
    plugin = UnseenTests() if hasattr(config, "workerinput") else AcceptanceResults(config)
    config.pluginmanager.register(plugin, "infer-acceptance-results")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach the markers to the report, which is all that crosses from an xdist worker."""
    report = yield
    report.user_properties = [pair for pair in report.user_properties if pair[0] != _KEY]
    report.user_properties.append((_KEY, markers_of(item)))
    return report


def markers_of(item: pytest.Item) -> dict[str, Any]:
    """The acceptance markers of a test. `row(id, clause)` may be given several times; `waits(row)` names what it waits for."""
    rows = []
    for mark in item.iter_markers("row"):
        identifier, clause = (*mark.args, "")[:2]
        rows.append([str(identifier), str(mark.kwargs.get("clause", clause))])
    waits = [str(argument) for mark in item.iter_markers("waits") for argument in mark.args]
    return {"rows": sorted(rows), "waits": sorted(set(waits)), "gpu": item.get_closest_marker("gpu") is not None}


class UnseenTests:
    """Collects the tests of this process that need a GPU and were deselected. A worker hands them to the controller."""

    def __init__(self) -> None:
        self.not_run: dict[str, dict[str, Any]] = {}

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        for item in items:
            marks = markers_of(item)
            if marks["gpu"] and marks["rows"]:
                self.not_run[item.nodeid] = {"outcome": "not run", "reason": "needs a GPU", **marks}

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        session.config.workeroutput[_KEY] = self.not_run  # type: ignore[attr-defined]


class AcceptanceResults(UnseenTests):
    """Collects one entry per test of this run. The worst phase (setup, call, teardown) decides a test's outcome."""

    def __init__(self, config: pytest.Config) -> None:
        super().__init__()
        self.path: Path | None = config.getoption("--results")
        self.run: str = config.getoption("--results-run")
        self.fail_on_skip: bool = config.getoption("--fail-on-skip")
        self.tests: dict[str, dict[str, Any]] = {}

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """A worker of xdist has ended; one that died has no output."""
        self.not_run.update(getattr(node, "workeroutput", {}).get(_KEY, {}))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.tests[report.nodeid] = {"outcome": "skipped", "reason": skip_reason(report), **_NO_MARKS}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        marks: Any = next((value for key, value in report.user_properties if key == _KEY), _NO_MARKS)
        outcome: str = report.outcome
        if hasattr(report, "wasxfail"):
            outcome = "xfailed" if report.skipped else "failed"
        entry = self.tests.setdefault(report.nodeid, {"outcome": "passed", "reason": "", **marks})
        if _SEVERITY[outcome] > _SEVERITY[entry["outcome"]]:
            entry["outcome"] = outcome
            entry["reason"] = skip_reason(report) if outcome == "skipped" else report.when

    def unwanted_skips(self) -> dict[str, str]:
        return {
            nodeid: entry["reason"]
            for nodeid, entry in sorted(self.tests.items())
            if entry["outcome"] == "skipped" and not entry["gpu"]
        }

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.path is not None:
            merge(self.path, self.run, {**self.not_run, **self.tests})
        if self.fail_on_skip and session.exitstatus == pytest.ExitCode.OK and self.unwanted_skips():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        unwanted = self.unwanted_skips() if self.fail_on_skip else {}
        if unwanted:
            terminalreporter.section("skips that fail this run", sep="=", red=True)
            for nodeid, reason in unwanted.items():
                terminalreporter.line(f"{nodeid}: {reason}")


def skip_reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The text given to skip; pytest stores (path, line, reason)."""
    longrepr = report.longrepr
    if isinstance(longrepr, tuple):
        return str(longrepr[2]).removeprefix("Skipped: ")
    return str(longrepr)


def merge(path: Path, run: str, tests: dict[str, dict[str, Any]]) -> None:
    """Replace the entries of this run, keep those of others, write in one step."""
    stored: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    stored[run] = dict(sorted(tests.items()))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(stored, indent=1) + "\n", "utf-8")
    partial.replace(path)
