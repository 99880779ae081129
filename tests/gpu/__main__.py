"""`python -m gpu`: run the parts, write the JSON after every check, print the table. Exit status 1 when a check failed.

The parent imports neither torch nor triton, except in a dry run, which does all in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gpu.checks import Result, line_sink, run_checks
from gpu.needs import complaint, missing
from gpu.parts import PARTS, TOTAL, Part, chosen
from gpu.processes import python, run_part
from gpu.report import Report
from gpu.stand_in import installed, stand_in

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.list:
        print("\n".join(f"{part.name}: at most {part.budget:.0f} s" for part in PARTS))
        return 0
    absent = missing()
    if absent:
        print(complaint(absent), file=sys.stderr)
        return 2
    if options.part is not None:
        return run_here(options)
    os.environ["TRITON_INTERPRET"] = "1" if options.dry_run else "0"  # before Triton is imported, here and in children
    output = options.output or ROOT / "docs" / "gpu" / time.strftime("run-%Y%m%d-%H%M%S.json", time.gmtime())
    if options.dry_run and options.output is None:
        output = Path(tempfile.gettempdir()) / "infer-gpu-dry-run.json"
    if options.dry_run:
        from triton_interpreter import mend

        mend()
    report = Report(output, dry_run=options.dry_run, commit=commit())
    with tempfile.TemporaryDirectory(prefix="infer-gpu-", dir=options.directory) as directory:
        if not installed():
            (Path(directory) / "metadata").mkdir()
            stand_in(ROOT, Path(directory) / "metadata")
        hard_stop = time.monotonic() + TOTAL
        for part in chosen(options.parts):
            if options.dry_run:
                run_dry(part, Path(directory), report)
            else:
                command = python("-m", "gpu", "--part", part.name, "--directory", directory)
                run_part(part.name, command, part.budget, report.add, hard_stop=hard_stop)
    report.write()
    print(f"\n{report.markdown()}\n\nwritten to {output}")
    return 1 if any(result.passed is False for result in report.results) else 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/gpu/run.sh", description="What only a GPU can show. See docs/gpu.md.")
    parser.add_argument(
        "--dry-run", action="store_true", help="the same code on this CPU with tiny sizes, in one process"
    )
    parser.add_argument("--output", type=Path, help="the JSON file; without it docs/gpu/run-DATE-TIME.json")
    parser.add_argument("--parts", help="comma-separated names of parts; without it all")
    parser.add_argument("--list", action="store_true", help="print the parts and their budgets")
    parser.add_argument("--directory", type=Path, help="where random checkpoints of 5 GB may lie; /dev/shm is quick")
    inner = parser.add_argument_group("for the processes of parts")
    inner.add_argument("--part", help=argparse.SUPPRESS)
    inner.add_argument("--skip", default="[]", help=argparse.SUPPRESS)
    inner.add_argument("--seconds", type=float, default=TOTAL, help=argparse.SUPPRESS)
    inner.add_argument("--events", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def run_here(options: argparse.Namespace) -> int:
    """The process of one part."""
    from gpu.place import Place

    deadline = time.monotonic() + options.seconds
    [part] = chosen(options.part)
    place = Place(options.directory, dry_run=options.dry_run)
    with options.events.open("a", encoding="utf-8") as events:
        run_checks(part.name, part.load()(place), line_sink(events), deadline=deadline, skip=json.loads(options.skip))
    return 0


def run_dry(part: Part, directory: Path, report: Report) -> None:
    from gpu.place import Place

    def sink(event: dict[str, object]) -> None:
        if event.pop("event") == "done":
            report.add(Result(**event))  # type: ignore[arg-type]

    place = Place(directory, dry_run=True)
    run_checks(part.name, part.load()(place), sink, deadline=time.monotonic() + TOTAL)


def commit() -> str:
    """Of the working tree; empty where there is no git."""
    try:
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


if __name__ == "__main__":
    sys.exit(main())
