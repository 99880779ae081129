"""The outcome as one JSON file, written anew after every check, and as a Markdown table. Runs in the parent; owns the file.

The schema is documented in docs/gpu.md; `SCHEMA` goes up by one when a field changes its meaning or goes.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu.checks import Result
from gpu.claims import rows_of

SCHEMA = 1


class Report:
    """Collects results."""

    def __init__(self, path: Path, *, dry_run: bool, commit: str) -> None:
        self._path = path
        self._dry_run, self._commit = dry_run, commit
        self._started = time.time()
        self._clock = time.monotonic()
        self.results: list[Result] = []

    def add(self, result: Result) -> None:
        """Keep it, say it, write the file."""
        self.results.append(result)
        state = {True: "ok", False: "FAILED", None: "not run"}[result.passed]
        figure = f"  {figure_words(result.facts)}" if "value" in result.facts else ""
        print(
            f"[{self.seconds():6.1f} s] {result.part}: {result.name}: {state} ({result.seconds:.1f} s){figure}",
            flush=True,
        )
        if result.passed is not True and result.error:
            print(f"           {result.error.strip().splitlines()[-1][:200]}", flush=True)
        self.write()

    def seconds(self) -> float:
        return time.monotonic() - self._clock

    def as_json(self) -> dict[str, Any]:
        environment = next((r.facts for r in self.results if (r.part, r.name) == ("machine", "environment")), {})
        return {
            "schema": SCHEMA,
            "dry_run": self._dry_run,
            "commit": self._commit,
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._started)),
            "seconds": round(self.seconds(), 3),
            "environment": environment,
            "passed": sum(result.passed is True for result in self.results),
            "failed": sum(result.passed is False for result in self.results),
            "not_run": sum(result.passed is None for result in self.results),
            "below_target": sum(result.facts.get("reached") is False for result in self.results),
            "checks": [asdict(one) | {"rows": rows_of(one.part, one.name)} for one in self.results],
        }

    def write(self) -> None:
        """In one step: a reader never sees half a file."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self.as_json(), indent=1, default=str) + "\n", "utf-8")
        partial.replace(self._path)

    def markdown(self) -> str:
        """Figures in one table, then what failed."""
        lines = ["| figure | measured | ceiling | share | must reach | reached |", "|---|---|---|---|---|---|"]
        for result in self.results:
            facts = result.facts
            if "value" in facts:
                cells = [f"{result.part}: {result.name}", number(facts["value"], facts["unit"])]
                cells += ["" if facts.get("ceiling") is None else number(facts["ceiling"], facts["unit"])]
                cells += ["" if facts.get(key) is None else f"{facts[key]:.2f}" for key in ("share", "target")]
                cells.append({True: "yes", False: "NO", None: ""}[facts.get("reached")])
                lines.append(f"| {' | '.join(cells)} |")
        made = self.as_json()
        lines += ["", f"{made['passed']} passed, {made['failed']} failed, {made['not_run']} not run, "
                  f"{made['below_target']} figures below their targets, {made['seconds']:.0f} s."]  # fmt: skip
        for result in self.results:
            if result.passed is not True:
                state = "not run" if result.passed is None else "FAILED"
                reason = (result.error.strip().splitlines() or [""])[-1]
                lines.append(f"* {state}: {result.part}: {result.name}: {reason}")
        return "\n".join(lines)


def number(value: float, unit: str) -> str:
    return f"{value:,.3g} {unit}" if value < 100 else f"{value:,.0f} {unit}"


def figure_words(facts: dict[str, Any]) -> str:
    share = "" if facts.get("share") is None else f", {facts['share']:.0%} of the ceiling"
    return number(facts["value"], facts["unit"]) + share
