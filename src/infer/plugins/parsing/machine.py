"""The streaming machine: plain text, reasoning and calls of one choice, told apart by a `Dialect`.

Runs in the request's task; owns the state of one choice. A generator reads, so the split of the text cannot matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from infer.plugins.parser import ParserEvent
from infer.plugins.parsing.calls import CallFormat, Calls, Rest
from infer.plugins.parsing.dialect import Dialect, starts_in_reasoning
from infer.plugins.parsing.source import Malformed, Reading, Source
from infer.plugins.parsing.transcripts import merge_events

Mode = Literal["text", "reasoning"]
Reader = Callable[[Source, Calls, str], Reading[None]]


class StreamParser:
    """Feeds a reader; the part that every kind of parser shares."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] | None) -> None:
        self._source = Source()
        self._events: list[ParserEvent] = []
        self._calls = None if tools is None else Calls(self._source, self._events.append, tools)
        self._reader: Reading[None] | None = None

    def feed(self, text: str, token_ids: Sequence[int]) -> list[ParserEvent]:
        self._source.append(text)
        return self._advance()

    def finish(self) -> list[ParserEvent]:
        self._source.complete = True
        return self._advance()

    def _advance(self) -> list[ParserEvent]:
        if self._reader is None:
            self._reader = self._read()
        next(self._reader, None)
        said = merge_events(self._events)
        self._events.clear()
        return said

    def _read(self) -> Reading[None]:
        raise NotImplementedError

    def _say(self, mode: Mode, text: str) -> None:
        if text:
            self._events.append(ParserEvent(mode, text))
        self._source.commit()


class TableParser(StreamParser):
    def __init__(self, dialect: Dialect, tools: Sequence[Mapping[str, Any]] | None) -> None:
        super().__init__(tools)
        self._dialect = dialect
        self._prompt: str | None = None
        self._mode: Mode = "text"
        self._fresh = True
        """Only white space was read since the output, reasoning or a call began or ended."""
        self._after_call = False
        self._silent = True
        """No text but white space was said, and no call."""
        self._broken: Rest | None = None
        """Reads on in a list of which a call broke, at a comma before its bracket."""

    def begin(self, prompt: str) -> None:
        self._prompt = prompt

    def _read(self) -> Reading[None]:
        source = self._source
        reasoning = self._dialect.reasoning
        if reasoning and starts_in_reasoning(reasoning.start, reasoning.end, reasoning.implied, self._prompt):
            self._mode = "reasoning"
        while True:
            if self._fresh:
                yield from source.spaces()
                mark = yield from source.match(self._marks())
                if mark is None:
                    if source.at_end() and self._after_call:
                        source.commit()  # the line break behind a call belongs to the format
                    self._speak(source.unsaid())
                    self._fresh = False
                    continue
            else:
                mark = yield from source.until(self._marks(), self._speak)
                if mark is None:
                    return
            yield from self._handle(mark)

    def _marks(self) -> tuple[str, ...]:
        dialect, reasoning = self._dialect, self._dialect.reasoning
        marks = [*dialect.dropped, *(start for start, _ in dialect.dropped_spans)]
        if reasoning and self._mode == "reasoning":
            marks += reasoning.end
        if reasoning and (self._mode == "text" or self._fresh):
            marks += reasoning.start
        if self._broken:
            marks += [",", "]"]
        for table in self._tables():
            marks += table.openers
            if self._fresh and self._after_call:
                marks += table.closers
        return tuple(marks)

    def _tables(self) -> list[CallFormat]:
        if self._calls is None:
            return []
        reasoning = self._dialect.reasoning
        if self._mode == "reasoning" and not (reasoning and reasoning.ended_by_calls):
            return []
        return [table for table in self._dialect.calls if (self._silent and self._fresh) or not table.only_first]

    def _handle(self, mark: str) -> Reading[None]:
        source, dialect, reasoning = self._source, self._dialect, self._dialect.reasoning
        tables = [table for table in self._tables() if mark in table.openers]
        if self._broken and mark in ",]":
            yield from self._read_on(mark, self._broken)
        elif tables:
            self._broken = None
            yield from self._read_call(mark, [table.read for table in tables], tables[0].opener_is_body)
        elif reasoning and mark in reasoning.end and self._mode == "reasoning":
            self._turn("text")
        elif reasoning and mark in reasoning.start:
            self._turn("reasoning")
        else:
            for start, end in dialect.dropped_spans:
                if mark == start:
                    yield from self._skip_span(end)
                    return
            source.commit()

    def _turn(self, mode: Mode) -> None:
        self._source.commit()
        self._mode = mode
        self._fresh, self._after_call, self._broken = True, False, None

    def _skip_span(self, end: str) -> Reading[None]:
        source = self._source
        source.pinned = True
        start = source.pos
        pieces: list[str] = []
        found = yield from source.until((end, "\n"), pieces.append)
        source.pinned = False
        if found == end:
            source.commit()
            return
        source.pos = start  # no span: its beginning was text
        self._speak(source.unsaid())

    def _read_on(self, mark: str, rest: Rest) -> Reading[None]:
        """At a comma or the bracket of a list of which a call broke."""
        if mark == ",":
            yield from self._read_call(mark, [lambda source, calls, _: rest(source, calls)], False)
        else:
            self._broken = None
            self._speak(self._source.unsaid())

    def _read_call(self, opener: str, readers: Sequence[Reader], opener_is_body: bool) -> Reading[None]:
        """A call, or what was read of it as text."""
        source, calls = self._source, self._calls
        if calls is None:  # then there are no openers either
            return
        source.pinned = True
        start, furthest, before = source.pos, source.pos, calls.started
        calls.rest = self._broken
        for read in readers:
            source.pos = start - len(opener) if opener_is_body else start
            try:
                yield from read(source, calls, opener)
                break
            except Malformed:
                furthest = max(furthest, source.pos)
                if calls.started > before:
                    break
        source.pinned = False
        self._broken = calls.rest
        if calls.started == before:
            source.pos = furthest
            self._speak(source.unsaid())
            self._fresh = False
            return
        self._mode, self._silent = "text", False
        rest = source.unsaid()
        self._speak(rest)
        self._fresh, self._after_call = not rest, True

    def _speak(self, text: str) -> None:
        if self._mode == "text" and text.strip():
            self._silent = False
        self._say(self._mode, text)
