"""Each part in a process of its own: a kernel that breaks the CUDA context, or hangs, takes its own check down and no other.

Runs in the parent, which never touches the GPU; owns the children.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gpu.checks import Result

GRACE = 15.0
"""Seconds beyond its budget in which a part may finish the check it is at."""
FATAL = ("illegal memory access", "unspecified launch failure", "device-side assert", "misaligned address")
"""Words of errors after which a CUDA context answers nothing but errors."""
Report = Callable[[Result], None]


def run_part(part: str, command: Sequence[str], budget: float, report: Report, *, hard_stop: float) -> None:
    """Run `command --skip NAMES --seconds S --events FILE` until every check is answered or the time is up.

    `report` gets each result as it comes. A child that dies is started again behind the check it died in; `hard_stop` is a
    `time.monotonic` that no child outlives.
    """
    ends = min(time.monotonic() + budget, hard_stop)
    answered: list[str] = []
    while True:
        left = ends - time.monotonic()
        if left <= 0:
            report(Result(part, "the rest", None, 0.0, "the time of this part was used up"))
            return
        events, died = _run_child(part, command, answered, left, report)
        fatal = [event["name"] for event in events if any(word in event.get("error", "") for word in FATAL)]
        before = len(answered)
        answered += [event["name"] for event in events if event["event"] == "done"]
        if died is not None:
            answered.append(died.name)
            report(died)
        elif not fatal:
            return
        if not events or len(answered) == before:  # a child that says nothing would be started for ever
            return


def _run_child(
    part: str, command: Sequence[str], answered: Sequence[str], seconds: float, report: Report
) -> tuple[list[dict[str, Any]], Result | None]:
    """-> its events, and the check it died in."""
    with tempfile.TemporaryDirectory() as directory:
        path, errors = Path(directory) / "events", Path(directory) / "stderr"
        given = ["--skip", json.dumps(answered), "--seconds", f"{seconds:.0f}", "--events", str(path)]
        path.touch()
        started = time.monotonic()
        with errors.open("w") as stderr:
            child = subprocess.Popen([*command, *given], stderr=stderr, stdin=subprocess.DEVNULL)
            read = _EventReader(path, report)
            try:
                while child.poll() is None and time.monotonic() - started < seconds + GRACE:
                    read.more()
                    time.sleep(0.05)
            finally:
                code = child.poll()
                if code is None:
                    child.kill()
                    child.wait()
            read.more()
        if code == 0:
            return read.events, None
        why = (
            f"the process had to be ended after {seconds + GRACE:.0f} s"
            if code is None
            else f"the process ended with {code}"
        )
        words = errors.read_text("utf-8", errors="replace")[-2000:]
        name = read.running or ("behind the last check" if read.events else "start of its process")
        return read.events, Result(part, name, False, time.monotonic() - started, f"{why}\n{words}".strip())


class _EventReader:
    """Follows a file of event lines that another process writes."""

    def __init__(self, path: Path, report: Report) -> None:
        self._path, self._report, self._offset = path, report, 0
        self.events: list[dict[str, Any]] = []
        self.running: str | None = None
        """The check that was begun and not ended."""

    def more(self) -> None:
        with self._path.open(encoding="utf-8") as source:
            source.seek(self._offset)
            text = source.read()
        whole, newline, _ = text.rpartition("\n")
        self._offset += len((whole + newline).encode())
        for line in whole.splitlines():
            event = json.loads(line)
            self.events.append(event)
            self.running = event["name"] if event["event"] == "start" else None
            if event["event"] == "done":
                self._report(Result(**{key: value for key, value in event.items() if key != "event"}))


def python(*arguments: str) -> list[str]:
    """This interpreter."""
    return [sys.executable, *arguments]
