"""What formats have in common whose calls stand one by one between marks, alone or in a section.

A table's base; the reader runs in the request's task and owns nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from infer.plugins.parsing.calls import Calls
from infer.plugins.parsing.source import Reading, Source


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionCalls:
    """[section_open] call_open ... [section_close]; what stands in a call is the subclass's."""

    call_open: tuple[str, ...]
    """Any of these begins a call."""
    section_open: tuple[str, ...] = ()
    """Any of these may begin a section of several calls; empty: there are none."""
    section_close: tuple[str, ...] = ()
    """Ends of a section."""
    only_first: bool = False
    """An opener counts only where nothing has been said before it."""
    opener_is_body: bool = False
    """The opener is a part of the call itself, and is read again with it."""

    @property
    def openers(self) -> tuple[str, ...]:
        return (*self.section_open, *self.call_open)

    @property
    def nexts(self) -> tuple[str, ...]:
        """Marks that may follow a call and are read with it."""
        return (*self.call_open, *self.section_close)

    def read(self, source: Source, calls: Calls, opener: str) -> Reading[None]:
        if opener in self.section_open:
            yield from source.spaces()
            yield from source.expect(*self.call_open)
        while True:
            yield from self.read_call(source, calls)
            yield from source.spaces()
            after = yield from source.match(self.nexts)
            if after is None:
                source.pos = source.mark
                return
            if after in self.section_close:
                source.commit()
                return

    def read_call(self, source: Source, calls: Calls) -> Reading[None]:
        """One call, its opening mark behind it."""
        raise NotImplementedError
