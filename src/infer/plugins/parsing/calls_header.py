"""Calls whose name stands outside the JSON of the arguments, between marks (DeepSeek, Kimi K2, newer Mistral).

Tables; the reader runs in the request's task and owns nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from infer.plugins.parsing.calls import NAME, Calls
from infer.plugins.parsing.calls_section import SectionCalls
from infer.plugins.parsing.json_text import read_object
from infer.plugins.parsing.source import Malformed, Reading, Source


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderCalls(SectionCalls):
    """[section] call_open [before_name] NAME name_end [before_arguments] {...} [after_arguments] call_close ... [end]."""

    name_end: tuple[str, ...] = ()
    """Empty: the arguments' brace ends the name."""
    before_name: tuple[str, ...] = ()
    """Marks of which one may stand before the name."""
    name: str = r"(?P<name>.+)"
    """A pattern for the whole header; its group `name` is the function."""
    id_open: str = ""
    """Mark before the call's id, where the format writes one after the name."""
    header_is_id: bool = False
    """The whole header is the call's id too."""
    before_arguments: str = ""
    """A mark that may stand before the arguments."""
    after_arguments: str = ""
    """A mark that may stand behind them."""
    call_close: tuple[str, ...] = ()
    """Ends of a call; one that the model forgot is forgiven."""

    @property
    def closers(self) -> tuple[str, ...]:
        return (*self.section_close, *self.call_close)

    def read_call(self, source: Source, calls: Calls) -> Reading[None]:
        yield from source.spaces()
        if self.before_name:
            yield from source.match(self.before_name)
        start = source.pos
        header = yield from source.run(NAME)
        found = re.fullmatch(self.name, header)
        if found is None:
            source.pos = start
            raise Malformed
        call_id = header if self.header_is_id else ""
        yield from source.spaces()
        if self.id_open and (yield from source.match((self.id_open,))):
            call_id = yield from source.run(NAME)
        if self.name_end:
            yield from source.expect(*self.name_end)
            yield from source.spaces()
        if self.before_arguments and (yield from source.match((self.before_arguments,))):
            yield from source.spaces()
        name = found["name"]
        closed = yield from source.match(self.call_close)
        if closed is not None:  # no arguments at all
            calls.start(name, call_id)
            calls.arguments("{}")
            calls.end()
            return
        yield from read_object(source, lambda _: calls.start(name, call_id), calls.arguments)
        calls.end()
        yield from source.spaces()
        if self.after_arguments:
            yield from source.match((self.after_arguments,))
            yield from source.spaces()
        if self.call_close and (yield from source.match(self.call_close)) is None:
            source.pos = source.mark
            raise Malformed
        source.commit()
