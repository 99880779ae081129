"""One run of the command line: its consoles, its log level, and how it makes an engine. Owned by `main`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from infer.config.env import Environment, read_environment
from infer.plugins.model_source import ProgressCallback

if TYPE_CHECKING:
    from infer.config.engine import EngineConfig
    from infer.engine.engine import Engine

MakeEngine = Callable[["EngineConfig", ProgressCallback], AbstractAsyncContextManager[Any]]


def _real_engine(config: EngineConfig, on_progress: ProgressCallback) -> Engine:
    from infer.engine.engine import Engine  # noqa: PLC0415  only commands that run a model need it

    return Engine(config, on_progress=on_progress)


def _errors() -> Console:
    return Console(stderr=True, markup=False, highlight=False, soft_wrap=True)


@dataclass(slots=True)
class Session:
    """State shared by a command and `main`; tests give their own engine and environment."""

    make_engine: MakeEngine = _real_engine
    stated_environment: Environment | None = None
    """None: the process's, read when a command first asks."""
    err: Console = field(default_factory=_errors)
    """Everything that is not the answer: progress, notes, errors."""
    debug: bool = False
    log_level: str | None = None
    log_json: bool = False
    quiet: bool = False
    thinks: bool = False
    """What was shown last is a thought, in the middle of its line."""

    @property
    def environment(self) -> Environment:
        if self.stated_environment is None:
            self.stated_environment = read_environment()
        return self.stated_environment

    def write(self, text: str) -> None:
        """Part of the answer, to stdout at once. On a terminal control characters of the model's are made visible."""
        if self.thinks:
            text = text.lstrip("\n")
            if not text:
                return
            self.end_thought()
        sys.stdout.write(visible(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()

    def think(self, text: str) -> None:
        """Part of what the model thinks before it answers: no part of the answer, so to stderr."""
        if not self.thinks:
            text = text.lstrip("\n")
        if text:
            self.thinks = True
            self.err.print(visible(text), style=self.soft, end="")

    def end_thought(self) -> None:
        """What comes next has a line of its own."""
        if self.thinks:
            self.thinks = False
            self.err.print()

    def note(self, text: str) -> None:
        """A line for people, unless they asked for quiet."""
        self.end_thought()
        if not self.quiet:
            self.err.print(text, style=self.soft)

    @property
    def soft(self) -> str:
        """Style of what is no answer. NO_COLOR takes rich's colours, but not this, unless it is asked."""
        return "none" if self.err.no_color else "dim"

    def table(self, table: Table) -> None:
        """A table to stdout, as wide as it needs to be where nobody looks at it."""
        console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 1000)
        console.print(table)


def calls_shown(calls: Iterable[Sequence[str]]) -> str:
    """A line for each (name, arguments), behind a line that is there."""
    return visible("".join(f"\n[calls {name}({arguments})]" for name, arguments in calls))


def visible(text: str) -> str:
    """Control characters, with which a model could write all over a terminal, as what they are."""
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" if ord(c) < 256 else c for c in text)
