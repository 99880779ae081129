"""Calls whose arguments are tagged one by one and written as plain text (Qwen3-Coder, GLM 4.5, MiniMax M2).

Tables; the reader runs in the request's task and owns nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from infer.plugins.parsing.calls import NAME, Calls, read_text_value
from infer.plugins.parsing.calls_section import SectionCalls
from infer.plugins.parsing.coercion import quote
from infer.plugins.parsing.source import Malformed, Reading, Source

_KEY = re.compile(r'[^<>"\n]{1,256}')


@dataclass(frozen=True, slots=True, kw_only=True)
class XmlCalls(SectionCalls):
    """[section] call_open NAME [name_end] (key_open KEY key_end [value_open] VALUE value_end)* call_close ... [end]."""

    name_end: str = ""
    """Behind the function's name."""
    key_open: str
    """Before each argument's name."""
    key_end: tuple[str, ...]
    """Behind it."""
    string_key_end: str = ""
    """Of the key ends, the one that says that the value is a string; then the others say that it is JSON."""
    value_open: str = ""
    """Before the value, where the format has a mark there."""
    value_end: str
    """Behind the value."""
    value_end_missing: tuple[str, ...] = ()
    """Marks that end a value too where the model forgot its end, and stay to be read."""
    trim_line: bool = False
    """One line break after the value's opening and one before its end belong to the format."""
    call_close: str
    """Ends a call."""

    @property
    def closers(self) -> tuple[str, ...]:
        return (self.call_close, *self.section_close)

    @property
    def nexts(self) -> tuple[str, ...]:
        """Without a section every call stands alone, and the machine finds the next one."""
        return (*(self.call_open if self.section_open else ()), *self.section_close)

    def read_call(self, source: Source, calls: Calls) -> Reading[None]:
        yield from source.spaces()
        name = yield from source.run(NAME)
        if self.name_end:
            yield from source.expect(self.name_end)
        yield from source.spaces()
        mark = yield from source.expect(self.key_open, self.call_close)
        source.pos -= len(mark)  # not said yet, should the argument break
        calls.start(name)
        source.pos += len(mark)
        before = "{"
        while mark == self.key_open:
            yield from self._argument(source, calls, before)
            before = ", "
            yield from source.spaces()
            mark = yield from source.expect(self.key_open, self.call_close)
        calls.arguments("{}" if before == "{" else "}")
        calls.end()

    def _argument(self, source: Source, calls: Calls, before: str) -> Reading[None]:
        key = yield from source.run(_KEY)
        if not key.strip():
            raise Malformed
        end = yield from source.expect(*self.key_end)
        if self.value_open:
            yield from source.spaces()
            yield from source.expect(self.value_open)
        ends = (self.value_end, *self.value_end_missing)
        if self.trim_line:
            yield from source.match(("\n",))
            ends = (*(f"\n{mark}" for mark in ends), *ends)
        as_string = end == self.string_key_end if self.string_key_end else None
        opening = f"{before}{quote(key.strip())}: "
        found = yield from read_text_value(source, calls, opening, key.strip(), ends, as_string)
        if found.removeprefix("\n") in self.value_end_missing:
            source.pos -= len(found.removeprefix("\n"))
            source.commit()
