"""Log output of the command line: a handler on the logger "infer" while a command runs. The root logger is left alone."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator

from infer.cli.session import Session
from infer.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error")
_STARTUP = "infer.engine.startup"
"""What this logger says at INFO (the memory plan, decisions) is shown unless --quiet: it is for whoever starts an engine."""


@contextlib.contextmanager
def logging_to(session: Session) -> Iterator[None]:
    """Logs go to the session's stderr console inside the block; the loggers are as before after it."""
    name = (session.log_level or session.environment.log_level or "warning").lower()
    if name not in LEVELS:
        raise ConfigError(f"log level {name!r}: write one of {', '.join(LEVELS)}", fields=("--log-level",))
    level = logging.getLevelNamesMapping()[name.upper()]
    handler: logging.Handler = _ConsoleHandler(session)
    handler.setFormatter(_JsonFormatter() if session.log_json or session.environment.log_json else _LineFormatter())
    logger, startup = logging.getLogger("infer"), logging.getLogger(_STARTUP)
    before = logger.level, startup.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
    startup.setLevel(level if session.quiet else min(level, logging.INFO))
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        startup.setLevel(before[1])
        logger.propagate = before[2]


class _ConsoleHandler(logging.Handler):
    """Through the console, so that lines and progress bars do not overwrite each other."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session

    def emit(self, record: logging.LogRecord) -> None:
        try:
            style = (
                "bold red"
                if record.levelno >= logging.ERROR
                else "yellow"
                if record.levelno >= logging.WARNING
                else "dim"
            )
            self._session.err.print(self.format(record), style=style)
        except Exception:
            self.handleError(record)


class _LineFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.levelno >= logging.WARNING:
            return f"{record.levelname.lower()}: {text}"
        return text if record.name == _STARTUP else f"{record.name}: {text}"


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
