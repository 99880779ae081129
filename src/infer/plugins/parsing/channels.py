"""The streaming machine for messages with headers, as in harmony (gpt-oss): the channel says what a message is.

Runs in the request's task; owns the state of one choice.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infer.plugins.parsing.dialect import Reasoning
from infer.plugins.parsing.json_text import read_object
from infer.plugins.parsing.machine import Mode, StreamParser
from infer.plugins.parsing.source import Malformed, Reading

MAX_HEADER = 400
_WORD = re.compile(r"[\w.:\-=/ \n]{0,200}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """[start role] [to=RECIPIENT] channel CHANNEL [to=RECIPIENT] [constrain TYPE] message BODY end."""

    start: str
    channel: str
    message: str
    constrain: str
    ends: tuple[str, ...]
    reasoning_channels: tuple[str, ...]
    function_prefix: str
    """Of the recipients that are the request's tools."""
    reasoning: Reasoning
    """For the spec: what a grammar and a thinking budget look at."""


class ChannelParser(StreamParser):
    def __init__(self, table: Channels, tools: Sequence[Mapping[str, Any]] | None) -> None:
        super().__init__(tools)
        self._table = table
        self._header = ""
        """What the prompt already said of the first message's header."""

    def begin(self, prompt: str) -> None:
        """A prompt may end inside a header, or right behind one."""
        _, start, header = prompt.rpartition(self._table.start)
        if (start and header.endswith(self._table.message)) or self._table.message not in header:
            self._header = header if start else ""

    def _read(self) -> Reading[None]:
        table, source = self._table, self._source
        if self._header.endswith(table.message):
            yield from self._body(self._header.removesuffix(table.message))
        marks = (table.start, table.channel, table.message, *table.ends)
        while True:
            yield from source.spaces()
            mark = yield from source.match((*marks, "to="))
            if mark is None:
                if source.at_end():
                    source.commit()
                    return
                yield from self._stream("text")
            elif mark in table.ends:
                source.commit()
            elif mark == table.message:
                yield from self._body(self._header)
            else:
                source.pos -= len(mark)
                yield from self._message()
            self._header = ""

    def _message(self) -> Reading[None]:
        """A header and its body; a header that is none is text."""
        source, table = self._source, self._table
        pieces: list[str] = [self._header]
        source.pinned = True
        start = source.pos
        pieces.append((yield from source.match((table.start,))) or "")
        try:
            yield from self._read_header(pieces)
        except Malformed:
            source.pos = max(source.pos, start + 1)
            source.pinned = False
            self._say("text", source.unsaid())
            yield from self._stream("text")
            return
        source.pinned = False
        if source.at_end():
            source.commit()
            return
        yield from self._body("".join(pieces))

    def _read_header(self, pieces: list[str]) -> Reading[None]:
        """Up to the message mark, or the end of all text inside a header that was well formed so far."""
        source, table = self._source, self._table
        while True:
            word = yield from source.run(_WORD)
            pieces.append(word)
            mark = yield from source.match((table.message, table.channel, table.constrain))
            if mark == table.message:
                return
            header = "".join(pieces)
            if mark is None and source.at_end() and any(pieces[:-1]) and "to=" not in header:
                return
            if mark is None or len(header) > MAX_HEADER:
                raise Malformed
            pieces.append(mark)

    def _body(self, header: str) -> Reading[None]:
        table = self._table
        recipient = re.search(r"to=([^\s<]+)", header)
        name = recipient[1] if recipient else ""
        channel = re.search(re.escape(table.channel) + r"\s*(\w+)", header)
        if name.startswith(table.function_prefix) and self._calls is not None:
            yield from self._call(name.removeprefix(table.function_prefix))
            return
        reasons = channel is not None and channel[1] in table.reasoning_channels
        if not name.startswith(table.function_prefix):
            self._source.commit()
        yield from self._stream("reasoning" if reasons else "text")

    def _call(self, name: str) -> Reading[None]:
        source, calls, table = self._source, self._calls, self._table
        if calls is None:
            return
        source.pinned = True
        before = calls.started
        try:
            yield from source.spaces()
            if (yield from source.match(table.ends)):
                calls.start(name)
                calls.arguments("{}")
            else:
                yield from read_object(source, lambda _: calls.start(name), calls.arguments)
            calls.end()
            yield from source.spaces()
            yield from source.match(table.ends)
            source.commit()
        except Malformed:
            source.pinned = False
            if calls.started == before:
                self._say("text", source.unsaid())
            yield from self._stream("text")
        source.pinned = False

    def _stream(self, mode: Mode) -> Reading[None]:
        """The rest of a message. A mark that begins the next one stays to be read."""
        source, table = self._source, self._table
        self._say(mode, source.unsaid())
        mark = yield from source.until((table.start, table.channel, *table.ends), lambda piece: self._say(mode, piece))
        if mark is not None and mark not in table.ends:
            source.pos -= len(mark)
        source.commit()
