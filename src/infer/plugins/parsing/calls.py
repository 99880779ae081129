"""What the readers of calls share: where their events go, and the contract of a call format.

Owned by one parser; runs in the request's task.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from infer.plugins.parser import ParserEvent
from infer.plugins.parsing.coercion import STRING, ToolSchemas, coerce, quote
from infer.plugins.parsing.source import Malformed, Reading, Source

NAME = re.compile(r"[\w.\-:/]{1,256}")
MAX_DEPTH = 64


class CallFormat(Protocol):
    """The table of one way to write calls, with its reader."""

    @property
    def openers(self) -> tuple[str, ...]:
        """Texts that a call, or a section of calls, begins with."""
        ...

    @property
    def closers(self) -> tuple[str, ...]:
        """Texts that are dropped where they follow a call."""
        ...

    @property
    def only_first(self) -> bool:
        """Whether an opener counts only where nothing has been said before it."""
        ...

    @property
    def opener_is_body(self) -> bool:
        """Whether the opener is a part of the call itself, to be read again."""
        ...

    def read(self, source: Source, calls: Calls, opener: str) -> Reading[None]:
        """Read one call or section from behind the opener. Raises `Malformed`."""
        ...


class Calls:
    """Turns what a reader finds into events; everything it says moves the source's mark."""

    def __init__(self, source: Source, emit: Callable[[ParserEvent], None], tools: Sequence[Mapping[str, Any]]) -> None:
        self.schemas = ToolSchemas(tools)
        self._known = self.schemas.names()
        self._source = source
        self._emit = emit
        self.started = 0
        """How many calls have begun."""
        self.name = ""
        self.rest: Rest | None = None
        """Reads on behind a comma of the list that is being read: one broken call of several takes none along."""

    def known(self, name: str) -> bool:
        """Whether the request has this tool; true for every name when it has none at all."""
        return not self._known or name in self._known

    def start(self, name: str, call_id: str = "") -> None:
        if not name:
            raise Malformed
        self._emit(ParserEvent("tool_start", name, self.started, call_id))
        self.started += 1
        self.name = name
        self._source.commit()

    def arguments(self, piece: str) -> None:
        if piece:
            self._emit(ParserEvent("tool_args", piece, self.started - 1))
        self._source.commit()

    def end(self) -> None:
        self._emit(ParserEvent("tool_end", "", self.started - 1))
        self._source.commit()


Rest = Callable[[Source, Calls], Reading[None]]


def read_text_value(
    source: Source, calls: Calls, before: str, key: str, ends: Sequence[str], as_string: bool | None = None
) -> Reading[str]:
    """A value written as plain text up to one of `ends`, as JSON into the call's arguments after `before`.

    Strings go out as they come; other types wait for their end. Returns the mark that ended it, read."""
    types = STRING if as_string else None if as_string is False else calls.schemas.types(calls.name, key)
    if types == STRING:
        calls.arguments(f'{before}"')
        end = yield from source.until(ends, lambda piece: calls.arguments(quote(piece)[1:-1]))
        if end is None:
            raise Malformed
        calls.arguments('"')
        return end
    pieces: list[str] = []
    end = yield from source.until(ends, pieces.append)
    if end is None:
        raise Malformed
    calls.arguments(before + coerce("".join(pieces), types))
    return end
