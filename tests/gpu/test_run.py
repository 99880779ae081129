"""The run itself, without a GPU: its dry run, that nothing stops it, and what it writes. And, on a GPU, what the run proves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gpu import needs
from gpu.__main__ import ROOT
from gpu.checks import Check, NotHere, Result, run_checks
from gpu.claims import CLAIMS
from gpu.figures import figure
from gpu.parts import PARTS, TOTAL
from gpu.processes import run_part
from gpu.report import SCHEMA, Report

RUN = ROOT / "tests" / "gpu" / "run.sh"
NEEDS_A_GPU = {"torch's CUDA generator, bit for bit", "memcheck of the kernels"}


def run(output: Path, *options: str, limit: float, **more: str) -> dict[str, Any]:
    environment = {**os.environ, "PYTHON": sys.executable, **more}
    command = [str(RUN), "--output", str(output), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=limit)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    found: dict[str, Any] = json.loads(output.read_text("utf-8"))
    assert done.stdout.count(": ok (") == found["passed"]
    assert "| figure | measured |" in done.stdout
    return found


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> dict[str, Any]:
    output = tmp_path_factory.mktemp("run") / "dry.json"
    return run(output, "--dry-run", limit=280, INFER_CACHE_DIR=str(kernel_cache))


def test_a_dry_run_does_everything_but_the_device(dry: dict[str, Any]) -> None:
    assert (dry["schema"], dry["dry_run"], dry["failed"]) == (SCHEMA, True, 0)
    assert {check["part"] for check in dry["checks"]} == {part.name for part in PARTS}
    assert {check["name"] for check in dry["checks"] if check["passed"] is None} == NEEDS_A_GPU
    names = [(check["part"], check["name"]) for check in dry["checks"]]
    assert len(set(names)) == len(names)


def test_figures_of_a_dry_run_are_not_judged(dry: dict[str, Any]) -> None:
    figures = [check["facts"] for check in dry["checks"] if "value" in check["facts"]]
    assert len(figures) > 30
    assert all(facts["value"] > 0 and facts["reached"] is None for facts in figures)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim.row}-{claim.check}")
def test_every_claim_is_a_check_of_the_run(dry: dict[str, Any], claim: Any) -> None:
    [check] = [check for check in dry["checks"] if (check["part"], check["name"]) == (claim.part, claim.check)]
    assert [claim.row, claim.clause] in check["rows"]


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("run") / "gpu.json", limit=TOTAL + 60)


def on_a_gpu(claim: Any) -> Any:
    marks = [pytest.mark.gpu, pytest.mark.row(claim.row, claim.clause), pytest.mark.timeout(TOTAL + 120)]
    return pytest.param(claim, marks=marks, id=f"{claim.row}-{claim.check}")


@pytest.mark.parametrize("claim", [on_a_gpu(claim) for claim in CLAIMS])
def test_on_a_gpu(real: dict[str, Any], claim: Any) -> None:
    [check] = [check for check in real["checks"] if (check["part"], check["name"]) == (claim.part, claim.check)]
    assert check["passed"] is True, check["error"]


# -- nothing stops a run -------------------------------------------------------------------------------------------------


def collected(checks: Any, **options: Any) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    run_checks("part", checks, events.append, **{"deadline": time.monotonic() + 60} | options)
    return [event for event in events if event["event"] == "done"]


def test_a_failing_check_stops_no_other() -> None:
    def broken() -> None:
        raise ValueError("a reason")

    def absent() -> None:
        raise NotHere("no such tool")

    found = collected([Check("a", broken), Check("b", absent), Check("c", lambda: {"x": 1})])
    assert [(one["name"], one["passed"]) for one in found] == [("a", False), ("b", None), ("c", True)]
    assert "ValueError: a reason" in found[0]["error"]
    assert (found[1]["error"], found[2]["facts"]) == ("no such tool", {"x": 1})


def test_what_checks_share_may_fail() -> None:
    def checks() -> Any:
        yield Check("a", lambda: None)
        raise OSError("no room for a checkpoint")

    found = collected(checks())
    assert [(one["name"], one["passed"]) for one in found] == [("a", True), ("set-up", False)]


def test_a_part_whose_time_is_up_says_what_it_left() -> None:
    found = collected([Check("a", lambda: None)], deadline=time.monotonic() - 1)
    assert [(one["passed"], one["error"]) for one in found] == [(None, "the time of this part was used up")]


CHILD = """
import json, os, sys, time
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
skip = json.loads(options["--skip"])
def tell(**event):
    with open(options["--events"], "a") as out:
        out.write(json.dumps(event) + "\\n")
def done(name, passed=True, error=""):
    tell(event="done", part="p", name=name, passed=passed, seconds=0.0, error=error, facts={})
poisoned = False
for name in ("first", "dies", "poisons", "hangs", "last"):
    if name in skip:
        continue
    tell(event="start", name=name)
    if poisoned:
        done(name, False, "CUDA error: an illegal memory access was encountered")
    elif name == "dies" and "DIES" in os.environ:
        print("the last words", file=sys.stderr)
        os._exit(77)
    elif name == "poisons" and "POISONS" in os.environ:
        poisoned = True
        done(name, False, "CUDA error: an illegal memory access was encountered")
        sys.exit(0)
    elif name == "hangs" and "HANGS" in os.environ:
        time.sleep(600)
    else:
        done(name)
"""


def parts_run(monkeypatch: pytest.MonkeyPatch, *moods: str, budget: float = 60) -> list[Result]:
    for mood in moods:
        monkeypatch.setenv(mood, "1")
    found: list[Result] = []
    command = [sys.executable, "-S", "-c", CHILD]
    run_part("p", command, budget, found.append, hard_stop=time.monotonic() + 120)
    return found


def test_a_process_that_dies_takes_one_check_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {result.name: result for result in parts_run(monkeypatch, "DIES")}
    assert list(found) == ["first", "dies", "poisons", "hangs", "last"]
    assert [name for name, result in found.items() if not result.passed] == ["dies"]
    assert "ended with 77" in found["dies"].error and "the last words" in found["dies"].error


def test_a_broken_context_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {result.name: result.passed for result in parts_run(monkeypatch, "POISONS")}
    assert found == {"first": True, "dies": True, "poisons": False, "hangs": True, "last": True}


def test_a_process_that_does_not_start_is_not_tried_for_ever() -> None:
    found: list[Result] = []
    run_part(
        "p",
        [sys.executable, "-S", "-c", "raise SystemExit('no GPU')"],
        60,
        found.append,
        hard_stop=time.monotonic() + 60,
    )
    assert [(result.name, result.passed) for result in found] == [("start of its process", False)]
    assert "no GPU" in found[0].error


def test_a_check_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu.processes.GRACE", 0.5)
    found = {result.name: result for result in parts_run(monkeypatch, "HANGS", budget=3)}
    assert found["hangs"].passed is False and "had to be ended" in found["hangs"].error
    assert found["the rest"].passed is None


# -- what it writes ------------------------------------------------------------------------------------------------------


def test_the_file_is_whole_after_every_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(tmp_path / "new" / "run.json", dry_run=False, commit="abc")
    report.add(Result("kernels", "copy", True, 1.0, facts=figure(50.0, "GB/s", ceiling=100.0, target=0.7)))
    stored = json.loads((tmp_path / "new" / "run.json").read_text("utf-8"))
    assert (stored["passed"], stored["below_target"], stored["commit"]) == (1, 1, "abc")
    assert stored["checks"][0]["facts"]["reached"] is False
    report.add(Result("kernels", "other", False, 1.0, error="Traceback\nValueError: wrong"))
    assert json.loads((tmp_path / "new" / "run.json").read_text("utf-8"))["failed"] == 1
    page = report.markdown()
    assert "| kernels: copy | 50 GB/s | 100 GB/s | 0.50 | 0.70 | NO |" in page
    assert "* FAILED: kernels: other: ValueError: wrong" in page
    assert "kernels: copy: ok" in capsys.readouterr().out


def test_a_missing_package_is_named_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = needs.missing(["json", "no_such_package_here"])
    assert absent == ["no_such_package_here"]
    monkeypatch.setitem(needs.PACKAGES, "no_such_package_here", "1 or newer")
    assert "no_such_package_here (1 or newer)" in needs.complaint(absent)
    assert "pip install no_such_package_here" in needs.complaint(absent)


def test_a_source_tree_needs_no_installation(tmp_path: Path) -> None:
    """Python without site-packages, where nothing is installed."""
    program = (
        "import sys, pathlib; from gpu.stand_in import installed, stand_in; before = installed();"
        "stand_in(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]));"
        "import subprocess; child = 'from gpu.stand_in import installed; print(installed())';"
        "print(before, installed(), subprocess.check_output([sys.executable, '-S', '-c', child], text=True))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", program, str(ROOT), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout.split() == ["False", "True", "True"], done.stderr


def test_an_unknown_part_is_refused() -> None:
    done = subprocess.run(
        [str(RUN), "--parts", "kernels,nonsense"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode != 0 and "no part 'nonsense'" in done.stderr
