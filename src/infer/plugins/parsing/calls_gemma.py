"""Calls as FunctionGemma and Gemma 4 write them: call:NAME{key:<quote>text<quote>,n:3,list:[...]}.

Tables; the reader runs in the request's task and owns nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from infer.plugins.parsing.calls import MAX_DEPTH, NAME, Calls, read_text_value
from infer.plugins.parsing.coercion import quote
from infer.plugins.parsing.source import Malformed, Reading, Sink, Source

_KEY = re.compile(r"[\w.\-$ ]{1,256}")
_WORD = re.compile(r"[-+\w.]+", re.ASCII)
_JSON_WORD = re.compile(r"true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?", re.ASCII)

_PYTHON_WORDS = {"None": "null", "True": "true", "False": "false"}
"""As the published template of Gemma 4 prints them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaCalls:
    """call:NAME{key:value, ...}, whose strings stand between marks of their own."""

    openers: tuple[str, ...]
    """Texts that a call, or a list of calls, begins with."""
    closers: tuple[str, ...]
    """Texts that are dropped where they follow a call."""
    quote: str
    """The mark on both sides of a string."""
    only_first: bool = False
    """An opener counts only where nothing has been said before it."""
    opener_is_body: bool = False
    """The opener is a part of the call itself, and is read again with it."""

    def read(self, source: Source, calls: Calls, opener: str) -> Reading[None]:
        yield from source.spaces()
        yield from source.expect("call:")
        name = yield from source.run(NAME)
        yield from source.expect("{")
        before = "{"
        while True:
            yield from source.spaces()
            if (yield from source.match(("}",))):
                break
            if before != "{":
                yield from source.match((",",))  # models forget it
                yield from source.spaces()
            before = yield from self._argument(source, calls, name, before)
        if before == "{":
            calls.start(name)
        calls.arguments("{}" if before == "{" else "}")
        calls.end()
        yield from source.spaces()
        if (yield from source.match(self.closers)) is None:
            source.pos = source.mark
        source.commit()

    def _argument(self, source: Source, calls: Calls, name: str, before: str) -> Reading[str]:
        key = yield from self._key(source)
        opening = f"{before}{quote(key)}: "
        if (yield from source.match((self.quote,))):
            if before == "{":
                calls.start(name)
            yield from read_text_value(source, calls, opening, key, (self.quote,))
            return ", "
        pieces = [opening]

        def say(piece: str) -> None:
            if pieces:
                if before == "{":
                    calls.start(name)
                calls.arguments(pieces.pop())
            calls.arguments(piece)

        yield from self._value(source, say, MAX_DEPTH)
        return ", "

    def _key(self, source: Source) -> Reading[str]:
        if (yield from source.match((self.quote,))):
            pieces: list[str] = []
            yield from source.until((self.quote,), pieces.append)
            key = "".join(pieces)
        else:
            key = yield from source.run(_KEY)
        yield from source.expect(":")
        if not key.strip():
            raise Malformed
        return key.strip()

    def _value(self, source: Source, sink: Sink, depth: int) -> Reading[None]:
        if depth == 0:
            raise Malformed
        mark = yield from source.match((self.quote, "{", "["))
        if mark == self.quote:
            sink('"')
            if (yield from source.until((self.quote,), lambda piece: sink(quote(piece)[1:-1]))) is None:
                raise Malformed
            sink('"')
        elif mark is not None:
            yield from self._container(source, sink, depth, mark)
        else:
            start = source.pos
            word = yield from source.run(_WORD)
            word = _PYTHON_WORDS.get(word, word)
            if not _JSON_WORD.fullmatch(word):
                source.pos = start
                raise Malformed
            sink(word)

    def _container(self, source: Source, sink: Sink, depth: int, mark: str) -> Reading[None]:
        end = "}" if mark == "{" else "]"
        sink(mark)
        first = True
        while True:
            yield from source.spaces()
            if (yield from source.match((end,))):
                sink(end)
                return
            if not first:
                yield from source.expect(",")
                yield from source.spaces()
                sink(", ")
            if mark == "{":
                key = yield from self._key(source)
                sink(f"{quote(key)}: ")
            yield from self._value(source, sink, depth - 1)
            first = False
