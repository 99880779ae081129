"""Calls written as Python: f(a=1, b="x"), one or a list of them (Llama 3.2 and 4, Gemma 3, Olmo 3, LFM2).

Tables and a reader of Python's literals into JSON; runs in the request's task and owns nothing.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass

from infer.plugins.parsing.calls import MAX_DEPTH, Calls, Rest
from infer.plugins.parsing.coercion import quote
from infer.plugins.parsing.source import Malformed, Reading, Sink, Source

_NAME = re.compile(r"[A-Za-z_][\w.]{0,255}")
_WORD = re.compile(r"[-+\w.]+", re.ASCII)
_NUMBER = re.compile(r"[-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?", re.ASCII)
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\\": "\\", "'": "'", '"': '"', "0": "\0", "\n": ""}
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonCalls:
    """[f(a=1), g()], or without the list where `listed` is false; only keyword arguments are calls."""

    openers: tuple[str, ...]
    """Texts that a call, or a list of calls, begins with."""
    closers: tuple[str, ...] = ()
    """Texts that are dropped where they follow a call."""
    listed: bool = True
    """Whether the brackets are required."""
    bare: bool = False
    """No mark says that it is a call, "[" is the opener: unknown names are refused."""
    only_first: bool = False
    """An opener counts only where nothing has been said before it."""

    @property
    def opener_is_body(self) -> bool:
        return self.bare

    def read(self, source: Source, calls: Calls, opener: str) -> Reading[None]:
        yield from source.spaces()
        if (yield from source.match(("[",))) is not None:
            yield from self._list(source, calls)
        elif self.listed:
            raise Malformed
        else:
            yield from self._lines(source, calls)

    def _list(self, source: Source, calls: Calls) -> Reading[None]:
        while True:
            yield from source.spaces()
            yield from self._call(source, calls, self._list)
            yield from source.spaces()
            if (yield from source.expect(",", "]")) == "]":
                break
        calls.rest = None
        source.commit()
        yield from self._close(source)

    def _lines(self, source: Source, calls: Calls) -> Reading[None]:
        while True:
            yield from source.spaces()
            yield from self._call(source, calls)
            space = yield from source.spaces()
            if "\n" not in space and not (yield from source.match((",", ";"))):
                break
            if (yield from source.peek()) == "" or (yield from self._closes(source)):
                break
        source.pos = source.mark
        yield from self._close(source)

    def _close(self, source: Source) -> Reading[None]:
        yield from source.spaces()
        if self.closers and (yield from source.match(self.closers)) is not None:
            source.commit()
        else:
            source.pos = source.mark

    def _closes(self, source: Source) -> Reading[bool]:
        start = source.pos
        found = yield from source.match(self.closers)
        source.pos = start
        return found is not None

    def _call(self, source: Source, calls: Calls, rest: Rest | None = None) -> Reading[None]:
        start = source.pos
        name = yield from source.run(_NAME)
        if not name or (self.bare and not calls.known(name)):
            source.pos = start
            raise Malformed
        yield from source.expect("(")
        calls.rest = rest  # from here on it was meant to be a call
        yield from source.spaces()
        before = "{"
        while True:
            if before != "{" or (yield from source.peek()) == ")":
                if (yield from source.match((")",))):
                    break
                if before == "{":
                    raise Malformed
                yield from source.expect(",")
                yield from source.spaces()
                if (yield from source.match((")",))):
                    break
            before = yield from self._argument(source, calls, name, before)
            yield from source.spaces()
        if before == "{":
            calls.start(name)
        calls.arguments("{}" if before == "{" else "}")
        calls.end()

    def _argument(self, source: Source, calls: Calls, name: str, before: str) -> Reading[str]:
        key = yield from source.run(_NAME)
        if not key:
            raise Malformed
        yield from source.spaces()
        yield from source.expect("=")
        yield from source.spaces()
        opening = [f"{before}{quote(key)}: "]

        def say(piece: str) -> None:
            if opening:
                if before == "{":
                    calls.start(name)
                calls.arguments(opening.pop())
            calls.arguments(piece)

        yield from read_literal(source, say, MAX_DEPTH)
        return ", "


def read_literal(source: Source, sink: Sink, depth: int) -> Reading[None]:
    """One Python literal as JSON text into `sink`."""
    char = yield from source.peek()
    if depth == 0 or char == "":
        raise Malformed
    if char in "'\"":
        yield from _string(source, sink)
    elif char in "[(":
        yield from _sequence(source, sink, depth)
    elif char == "{":
        yield from _mapping(source, sink, depth)
    else:
        start = source.pos
        word = yield from source.run(_WORD)
        made = _WORDS.get(word) or _number(word)
        if made is None or (yield from source.peek()) in ("'", '"'):  # b'x', f"x"
            source.pos = start
            raise Malformed
        sink(made)


def _number(word: str) -> str | None:
    if not _NUMBER.fullmatch(word):
        return None
    text = word.replace("_", "")
    if text.lstrip("-+").isdigit():
        digits = text.lstrip("-+").lstrip("0") or "0"
        return f"-{digits}" if text.startswith("-") else digits
    value = float(text)
    return repr(value) if math.isfinite(value) else None


def _string(source: Source, sink: Sink) -> Reading[None]:
    end = yield from source.expect('"""', "'''", '"', "'")
    sink('"')
    while True:
        found = yield from source.until((end, "\\"), lambda piece: sink(json.dumps(piece, ensure_ascii=False)[1:-1]))
        if found is None:
            raise Malformed
        if found == end:
            sink('"')
            return
        yield from _escape(source, sink)


def _escape(source: Source, sink: Sink) -> Reading[None]:
    start = source.pos
    letter = yield from source.take(1)
    if letter in _HEX_ESCAPES:
        digits = yield from source.take(_HEX_ESCAPES[letter])
        code = int(digits, 16) if re.fullmatch(r"[0-9a-fA-F]+", digits) else -1
        if len(digits) == _HEX_ESCAPES[letter] and 0 <= code <= 0x10FFFF:
            sink(json.dumps(chr(code))[1:-1])
            return
    elif letter in _ESCAPES:
        sink(json.dumps(_ESCAPES[letter])[1:-1])
        return
    source.pos = start  # Python keeps a backslash that escapes nothing
    sink("\\\\")


def _sequence(source: Source, sink: Sink, depth: int) -> Reading[None]:
    end = "]" if (yield from source.expect("[", "(")) == "[" else ")"
    sink("[")
    first = True
    while True:
        yield from source.spaces()
        if (yield from source.match((end,))):
            sink("]")
            return
        if not first:
            yield from source.expect(",")
            yield from source.spaces()
            if (yield from source.match((end,))):
                sink("]")
                return
            sink(", ")
        yield from read_literal(source, sink, depth - 1)
        first = False


def _mapping(source: Source, sink: Sink, depth: int) -> Reading[None]:
    yield from source.expect("{")
    sink("{")
    first = True
    while True:
        yield from source.spaces()
        if (yield from source.match(("}",))):
            sink("}")
            return
        if not first:
            yield from source.expect(",")
            yield from source.spaces()
            if (yield from source.match(("}",))):
                sink("}")
                return
            sink(", ")
        if (yield from source.peek()) not in ("'", '"'):
            raise Malformed
        yield from _string(source, sink)
        yield from source.spaces()
        yield from source.expect(":")
        yield from source.spaces()
        sink(": ")
        yield from read_literal(source, sink, depth - 1)
        first = False
