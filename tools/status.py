"""Builds docs/status.md from the results of the tests and of the newest GPU run: which clauses of which capability are proven.
Runs by hand and in CI (`make status`, `--check`, `--skips`). Owns docs/status.md."""

from __future__ import annotations

import argparse
import csv
import difflib
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CAPABILITIES = ROOT / "docs" / "capabilities.tsv"
STATUS = ROOT / "docs" / "status.md"
GPU_RUNS = ROOT / "docs" / "gpu"

MILESTONES = ("engine", "server", "")  # the order of the page; the last one is everything else
PROVEN, WAITING, FAILING, ELSEWHERE, NOTHING = "proven", "waiting", "FAILING", "waiting for a GPU run", "nothing yet"


@dataclass(frozen=True)
class Row:
    """One line of docs/capabilities.tsv. The rows of a milestone come before the rest on the page."""

    id: str
    area: str
    milestone: str
    description: str
    acceptance: str


@dataclass
class Clause:
    """One clause of a row's acceptance sentence, and the tests that speak about it."""

    text: str
    tests: set[str] = field(default_factory=set)
    outcomes: set[str] = field(default_factory=set)
    waits: set[str] = field(default_factory=set)

    @property
    def state(self) -> str:
        if self.outcomes - {"passed", "not run"}:
            return FAILING
        if self.waits:
            return WAITING
        return PROVEN if "passed" in self.outcomes else ELSEWHERE


def read_rows(path: Path) -> dict[str, Row]:
    with path.open(encoding="utf-8", newline="") as source:
        lines = csv.DictReader(source, delimiter="\t", quoting=csv.QUOTE_NONE)
        return {line["id"]: Row(**line) for line in lines}


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """All tests of all runs by node id. A test that two runs selected counts by the later name."""
    if not path.is_file():
        raise SystemExit(f"{path} does not exist; run `make test` (and `make test-heavy`) first")
    runs: dict[str, dict[str, dict[str, Any]]] = json.loads(path.read_text("utf-8"))
    merged: dict[str, dict[str, Any]] = {}
    for name in sorted(runs):
        for nodeid, entry in runs[name].items():
            if nodeid not in merged or entry["outcome"] != "not run":
                merged[nodeid] = entry
    return merged


def read_gpu_run(directory: Path) -> dict[str, dict[str, Any]]:
    """The checks with a row of the newest run that tests/gpu/run.sh has left there (docs/gpu.md), as tests by name."""
    runs = [(json.loads(path.read_text("utf-8")), path.name) for path in sorted(directory.glob("*.json"))]
    real = sorted((run["started"], name, run) for run, name in runs if not run["dry_run"])
    if not real:
        return {}
    _, name, run = real[-1]
    outcomes = {True: "passed", False: "failed", None: "not run"}
    return {
        f"docs/gpu/{name}: {check['part']}: {check['name']}": {
            "outcome": outcomes[check["passed"]],
            "reason": check["error"],
            "rows": check["rows"],
            "waits": [],
            "gpu": True,
        }
        for check in run["checks"]
        if check["rows"]
    }


def clauses_by_row(tests: Mapping[str, Mapping[str, Any]], known: Iterable[str]) -> dict[str, dict[str, Clause]]:
    """Group the marked tests. A marker with an unknown row id is a mistake in that test, not a new capability."""
    known = set(known)
    rows: dict[str, dict[str, Clause]] = defaultdict(dict)
    for nodeid, entry in sorted(tests.items()):
        for row, text in entry["rows"]:
            if row not in known:
                raise SystemExit(f"{nodeid} names the capability {row!r}, which docs/capabilities.tsv does not have")
            clause = rows[row].setdefault(text, Clause(text))
            clause.tests.add(test_name(nodeid))
            clause.outcomes.add(entry["outcome"])
            clause.waits.update(entry["waits"])
    return rows


def test_name(nodeid: str) -> str:
    """The node id without its parameters: the same test on three event loops is one test."""
    return re.sub(r"\[.*\]$", "", nodeid)


def row_state(clauses: Mapping[str, Clause]) -> str:
    states = {clause.state for clause in clauses.values()}
    return next((state for state in (FAILING, WAITING, ELSEWHERE, PROVEN) if state in states), NOTHING)


def render(rows: Mapping[str, Row], clauses: Mapping[str, Mapping[str, Clause]]) -> str:
    order = sorted(rows.values(), key=lambda row: MILESTONES.index(row.milestone))
    counts = dict.fromkeys((PROVEN, WAITING, FAILING, ELSEWHERE, NOTHING), 0)
    for row in order:
        counts[row_state(clauses.get(row.id, {}))] += 1
    page = [
        "# Status",
        "",
        "Built by `make status` from the results of `make test` and `make test-heavy`; never edited by hand. A test says "
        "which clause of which capability it proves (`@pytest.mark.row`), and what a clause still waits for "
        "(`@pytest.mark.waits`; until then the engine refuses it by name, and that refusal is what is tested). "
        "*Proven* means that every clause listed here has a passing test: read the list beside the acceptance sentence "
        "to see what it covers. What only a GPU can show is *waiting for a GPU run* until a result of `tests/gpu/run.sh` "
        "lies in `docs/gpu/` ([GPU kernels](gpu.md)).",
        "",
        f"{len(order)} capabilities: " + ", ".join(f"{count} {state}" for state, count in counts.items()) + ".",
    ]
    tested = [row for row in order if clauses.get(row.id)]
    missing = [row for row in order if not clauses.get(row.id)]
    unseen = [
        f"* `{row.id}`: {clause.text or 'the sentence'}"
        for row in tested
        for clause in sorted(clauses[row.id].values(), key=lambda item: item.text)
        if clause.state == ELSEWHERE
    ]
    for milestone in MILESTONES:
        chosen = [row for row in tested if row.milestone == milestone]
        if chosen:
            page += ["", f"## {f'The {milestone}' if milestone else 'Everything else that has tests'}"]
            page += [line for row in chosen for line in render_row(row, clauses[row.id])]
    if unseen:
        page += ["", "## Waiting for a GPU run", "", *unseen]
    if missing:
        page += ["", "## Nothing yet", ""]
        page += [f"* `{row.id}` {f'({row.milestone}) ' if row.milestone else ''}{row.description}" for row in missing]
    return "\n".join(page) + "\n"


def render_row(row: Row, clauses: Mapping[str, Clause]) -> list[str]:
    lines = ["", f"### {row.id}: {row_state(clauses)}", "", row.description, "", f"> {row.acceptance}", ""]
    for clause in sorted(clauses.values(), key=lambda item: item.text):
        waits = f" for {', '.join(sorted(clause.waits))}" if clause.state == WAITING else ""
        lines.append(f"* **{clause.state}{waits}**: {clause.text or 'the sentence'}")
        lines += [f"  * `{test}`" for test in sorted(clause.tests)]
    return lines


def print_skips(tests: Mapping[str, Mapping[str, Any]]) -> None:
    skipped = {nodeid: entry for nodeid, entry in sorted(tests.items()) if entry["outcome"] in ("skipped", "not run")}
    for nodeid, entry in skipped.items():
        print(f"{nodeid}: {entry['outcome']}: {entry['reason']}")
    print(f"{len(tests)} tests recorded, {len(skipped)} skipped or not run")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "tests.json")
    parser.add_argument("--check", action="store_true", help="fail when docs/status.md is not what would be written")
    parser.add_argument("--skips", action="store_true", help="print the tests that did not run, and why")
    options = parser.parse_args(arguments)
    tests = read_results(options.results) | read_gpu_run(GPU_RUNS)
    if options.skips:
        print_skips(tests)
        return 0
    rows = read_rows(CAPABILITIES)
    page = render(rows, clauses_by_row(tests, rows))
    if not options.check:
        STATUS.write_text(page, "utf-8")
        return 0
    before = STATUS.read_text("utf-8") if STATUS.is_file() else ""
    difference = list(
        difflib.unified_diff(before.splitlines(), page.splitlines(), "docs/status.md", "from the tests", "", "", 1)
    )
    if difference:
        print("\n".join(difference))
        print("docs/status.md is not what the test results say; run `make test test-heavy status` and commit it")
    return 1 if difference else 0


if __name__ == "__main__":
    sys.exit(main())
