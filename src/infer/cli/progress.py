"""Downloads and loading made visible on stderr: bars on a terminal, else one line per stage.

Called from the worker thread that does the work; owns the rich display while it is entered.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn
from rich.table import Column

from infer.cli.session import Session
from infer.config.units import format_bytes
from infer.plugins import model_source


class ProgressDisplay:
    """`with ProgressDisplay(session) as report: Engine(config, on_progress=report)`. Leaving it clears the bars."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lock = threading.Lock()
        self._seen: set[str] = set()
        self._tasks: dict[str, TaskID] = {}
        self._bars: Progress | None = None
        self._open = False

    def __enter__(self) -> Self:
        self._open = not self._session.quiet
        if self._open and self._session.err.is_terminal:
            self._bars = Progress(
                TextColumn("{task.description}"),
                BarColumn(20),
                DownloadColumn(binary_units=True, table_column=Column(no_wrap=True)),
                TransferSpeedColumn(table_column=Column(no_wrap=True)),
                TextColumn(
                    "{task.fields[detail]}", style="dim", table_column=Column(no_wrap=True, overflow="ellipsis")
                ),
                console=self._session.err,
                transient=True,
            )
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._open = False
            if self._bars is not None:
                self._bars.stop()
                self._bars = None

    def __call__(self, report: model_source.Progress) -> None:
        with self._lock:
            if not self._open:
                return
            if report.unit == "" or self._bars is None:
                self._line(report)
            else:
                self._bar(self._bars, report)

    def _line(self, report: model_source.Progress) -> None:
        """A fact without a size, once; for bytes without a terminal, the beginning of a stage."""
        if report.unit == "":
            text = report.detail or report.stage
        elif report.stage == "load":  # its details are tensor names
            text = f"load: {format_bytes(report.total)}" if report.total else "load"
        elif report.stage == "verify":  # quick, and its result is a fact of its own
            return
        else:
            text = f"{report.stage}: {report.detail}"
        key = text if report.unit == "" else report.stage
        if key not in self._seen:
            self._seen.add(key)
            self._session.err.print(text, style="dim")

    def _bar(self, bars: Progress, report: model_source.Progress) -> None:
        task = self._tasks.get(report.stage)
        if task is None:
            task = self._tasks[report.stage] = bars.add_task(report.stage, detail=report.detail)
        bars.update(task, completed=report.done, total=report.total, detail=report.detail)
