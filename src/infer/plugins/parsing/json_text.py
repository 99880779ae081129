"""JSON as it arrives: checked character by character and passed on as valid JSON text.

Two slips that models make are mended on the way: control characters in strings, and backslashes that escape nothing.
"""

from __future__ import annotations

import json
import re

from infer.plugins.parsing.source import Malformed, Reading, Sink, Source

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_WORD = re.compile(r"[-+0-9.a-zA-Z]+")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?", re.ASCII)
_HEX = re.compile(r"[0-9a-fA-F]{4}")
_CLOSES = {"{": "}", "[": "]"}


def read_json(source: Source, sink: Sink) -> Reading[None]:
    """One JSON value, from its first character on, into `sink`."""
    stack: list[str] = []
    while True:
        char = yield from source.peek()
        if char == '"':
            yield from read_string(source, sink)
        elif char and char in "{[":
            source.pos += 1
            stack.append(char)
            space = yield from source.spaces()
            sink(char + space)
            after = yield from source.peek()
            if after != _CLOSES[char]:
                if char == "{":
                    yield from _key(source, sink)
                continue
        else:
            start = source.pos
            word = yield from source.run(_WORD)
            if word not in ("true", "false", "null") and not _NUMBER.fullmatch(word):
                source.pos = start
                raise Malformed
            sink(word)
        if (yield from _after_value(source, sink, stack)):
            return


def _after_value(source: Source, sink: Sink, stack: list[str]) -> Reading[bool]:
    """Close containers and read a comma. True when the outermost value is complete."""
    while stack:
        space = yield from source.spaces()
        char = yield from source.peek()
        if char == ",":
            source.pos += 1
            space += "," + (yield from source.spaces())
            sink(space)
            if stack[-1] == "{":
                yield from _key(source, sink)
            return False
        if char != _CLOSES[stack[-1]]:
            source.pos -= len(space)
            raise Malformed
        source.pos += 1
        stack.pop()
        sink(space + char)
    return True


def _key(source: Source, sink: Sink) -> Reading[None]:
    if (yield from source.peek()) != '"':
        raise Malformed
    yield from read_string(source, sink)
    space = yield from source.spaces()
    yield from source.expect(":")
    space += ":" + (yield from source.spaces())
    sink(space)


def read_string(source: Source, sink: Sink) -> Reading[None]:
    """A JSON string from its quote on."""
    yield from source.expect('"')
    sink('"')
    while True:
        plain = _PLAIN.match(source.text, source.pos)
        if plain and plain.end() > source.pos:
            source.pos = plain.end()
            sink(plain.group())
        char = yield from source.peek()
        if char == "":
            raise Malformed
        if char == '"':
            source.pos += 1
            sink('"')
            return
        if char == "\\":
            yield from _escape(source, sink)
        elif char < " ":
            source.pos += 1
            sink(json.dumps(char)[1:-1])


def _escape(source: Source, sink: Sink) -> Reading[None]:
    start = source.pos
    pair = yield from source.take(2)
    if len(pair) < 2:
        source.pos = start
        raise Malformed
    if pair[1] in '"\\/bfnrt':
        sink(pair)
        return
    if pair[1] == "u":
        digits = yield from source.take(4)
        if _HEX.fullmatch(digits):
            sink(pair + digits)
            return
    source.pos = start + 1
    sink("\\\\")  # a backslash that escapes nothing stands for itself


def read_string_value(source: Source) -> Reading[str]:
    """The value of a JSON string."""
    pieces: list[str] = []
    yield from read_string(source, pieces.append)
    value: str = json.loads("".join(pieces))
    return value


def read_object(source: Source, begin: Sink, sink: Sink) -> Reading[None]:
    """A JSON object into `sink`; `begin("")` is called before it, once the object has shown to be one."""
    first = True

    def pass_on(piece: str) -> None:
        nonlocal first
        if first:
            first = False
            held.append(piece)
            return
        if held:
            begin("")
            sink(held.pop())
        sink(piece)

    held: list[str] = []
    if (yield from source.peek()) != "{":
        raise Malformed
    yield from read_json(source, pass_on)
