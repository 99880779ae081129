"""Calls that are JSON objects, one or a list of them, with or without marks around (Hermes, Llama 3, Mistral, ...).

Tables; the reader runs in the request's task and owns nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from infer.plugins.parsing.calls import Calls
from infer.plugins.parsing.json_text import read_json, read_object, read_string_value
from infer.plugins.parsing.source import Malformed, Reading, Source

ID_KEYS = ("id", "tool_call_id", "call_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonCalls:
    """{"name": ..., "arguments": {...}}, in any order; arguments may themselves be JSON in a string."""

    openers: tuple[str, ...]
    """Texts that a call, or a list of calls, begins with."""
    closers: tuple[str, ...] = ()
    """Texts that are dropped where they follow a call."""
    name_keys: tuple[str, ...] = ("name",)
    """Keys that may hold the function's name."""
    argument_keys: tuple[str, ...] = ("arguments", "parameters")
    """Keys that may hold its arguments."""
    separators: tuple[str, ...] = ()
    """Texts between objects that are not in a list."""
    bare: bool = False
    """No mark says that it is a call, "{" is the opener: arguments are required, other keys and unknown names refused."""
    only_first: bool = False
    """An opener counts only where nothing has been said before it."""

    @property
    def opener_is_body(self) -> bool:
        return self.bare

    def read(self, source: Source, calls: Calls, opener: str) -> Reading[None]:
        yield from source.spaces()
        if (yield from source.match(("[",))) is None:
            yield from self._objects(source, calls)
        else:
            calls.rest = self._list
            yield from self._list(source, calls)
            return
        yield from self._close(source)

    def _list(self, source: Source, calls: Calls) -> Reading[None]:
        while True:
            yield from source.spaces()
            yield from _Object(self, source, calls).read()
            yield from source.spaces()
            if (yield from source.expect(",", "]")) == "]":
                break
        calls.rest = None
        yield from self._close(source)

    def _close(self, source: Source) -> Reading[None]:
        source.commit()
        yield from source.spaces()
        if self.closers and (yield from source.match(self.closers)) is not None:
            source.commit()
        else:
            source.pos = source.mark

    def _objects(self, source: Source, calls: Calls) -> Reading[None]:
        yield from _Object(self, source, calls).read()
        source.commit()
        while self.separators:
            yield from source.spaces()
            yield from source.match(self.separators)
            yield from source.spaces()
            if (yield from source.peek()) != "{":
                source.pos = source.mark
                return
            yield from _Object(self, source, calls).read()
            source.commit()


class _Object:
    """One call while it is read."""

    def __init__(self, table: JsonCalls, source: Source, calls: Calls) -> None:
        self._table, self._source, self._calls = table, source, calls
        self._name: str | None = None
        self._call_id = ""
        self._arguments: str | None = None
        """Arguments that came before the name."""
        self._said = False

    def read(self) -> Reading[None]:
        source = self._source
        yield from source.expect("{")
        depth = 1
        while depth:
            yield from source.spaces()
            if (yield from source.peek()) == "}" and self._said:  # a comma too many
                source.pos += 1
                depth -= 1
                continue
            key = yield from read_string_value(source)
            yield from source.spaces()
            yield from source.expect(":")
            yield from source.spaces()
            if key == "function" and (yield from source.match(("{",))):
                depth += 1  # the call as the API writes it: {"type": "function", "function": {...}}
                continue
            yield from self._value(key)
            while True:
                yield from source.spaces()
                if (yield from source.expect(",", "}")) == ",":
                    break
                depth -= 1
                self._complete(depth)
                if not depth:
                    return

    def _value(self, key: str) -> Reading[None]:
        source, table = self._source, self._table
        if key in table.name_keys and self._name is None:
            self._name = yield from read_string_value(source)
            if not self._name or (table.bare and not self._calls.known(self._name)):
                raise Malformed
            if self._arguments is not None:
                self._say(self._arguments)
        elif key in table.argument_keys and not self._said and self._arguments is None:
            yield from self._read_arguments()
        elif key in ID_KEYS:
            pieces: list[str] = []
            yield from read_json(source, pieces.append)
            self._call_id = "".join(pieces).strip('"')
        elif table.bare and key != "type":
            raise Malformed
        else:
            yield from read_json(source, lambda piece: None)  # a call has no place for other members

    def _read_arguments(self) -> Reading[None]:
        source, calls = self._source, self._calls
        if (yield from source.peek()) == "{" and self._name is not None:
            name = self._name
            yield from read_object(source, lambda _: calls.start(name, self._call_id), calls.arguments)
            calls.end()
            self._said = True
            return
        start = source.pos
        pieces: list[str] = []
        yield from read_json(source, pieces.append)
        arguments = _as_object("".join(pieces))
        if arguments is None:
            source.pos = start
            raise Malformed
        self._arguments = arguments
        if self._name is not None:
            self._say(arguments)

    def _say(self, arguments: str) -> None:
        self._calls.start(self._name or "", self._call_id)
        self._calls.arguments(arguments)
        self._calls.end()
        self._said = True

    def _complete(self, depth: int) -> None:
        if depth or self._said:
            return
        if self._name is None or self._table.bare:
            raise Malformed
        self._say("{}")


def _as_object(text: str) -> str | None:
    """The JSON text of arguments that are an object, a string that holds one, or nothing."""
    value = _loads(text)
    if isinstance(value, str):
        text = value.strip() or "{}"
        value = _loads(text)
    if text == "null":
        return "{}"
    return text if isinstance(value, dict) else None


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # nested too deeply, integers too long
        return None
