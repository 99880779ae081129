"""The text that a parser has been fed, read by generators that wait for more: they `yield` when they cannot decide yet.

Owns the buffer of one parser. Every decision depends on the characters alone, never on how they were split.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator, Sequence
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A reader: yields when it needs more text, returns what it read. Raises `Malformed`."""
Sink = Callable[[str], None]

SPACE = " \t\r\n"
_SPACES = re.compile(r"[ \t\r\n]*")
COMPACT_AT = 1 << 14


class Malformed(Exception):
    """The text is not of the form that was being read. It is given back from `Source.mark` to `Source.pos` as text."""


class Source:
    """`pos` is the next character to read; what lies before `mark` has been said in events."""

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        self.mark = 0
        self.complete = False
        """No more text will come."""
        self.pinned = False
        """Somebody remembers positions: nothing is forgotten meanwhile."""

    def append(self, text: str) -> None:
        self.text += text

    def commit(self) -> None:
        """All that was read is accounted for."""
        self.mark = self.pos

    def unsaid(self) -> str:
        """What was read since the mark; marks it."""
        text = self.text[self.mark : self.pos]
        self.mark = self.pos
        return text

    def at_end(self) -> bool:
        return self.complete and self.pos >= len(self.text)

    def peek(self) -> Reading[str]:
        """The next character, unread; "" at the end."""
        while self.pos >= len(self.text):
            if self.complete:
                return ""
            yield
        return self.text[self.pos]

    def take(self, count: int) -> Reading[str]:
        """Exactly `count` characters, or at the end those that are left."""
        while len(self.text) - self.pos < count and not self.complete:
            yield
        piece = self.text[self.pos : self.pos + count]
        self.pos += len(piece)
        return piece

    def spaces(self) -> Reading[str]:
        """White space, until something else comes or the end."""
        start = self.pos
        while True:
            found = _SPACES.match(self.text, self.pos)
            self.pos = found.end() if found else self.pos
            if self.pos < len(self.text) or self.complete:
                return self.text[start : self.pos]
            yield

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """The longest text that `pattern` matches here; "" where it does not."""
        while True:
            found = pattern.match(self.text, self.pos)
            end = found.end() if found else self.pos
            if end < len(self.text) or self.complete:
                piece = self.text[self.pos : end]
                self.pos = end
                return piece
            yield

    def match(self, literals: Sequence[str]) -> Reading[str | None]:
        """The longest of the literals that comes next, read; None (and nothing read) when none does."""
        while True:
            rest = self.text[self.pos : self.pos + max(map(len, literals), default=0)]
            if self.complete or not literals or (rest and rest not in _beginnings(tuple(literals))):
                break
            yield
        found = max((known for known in literals if rest.startswith(known)), key=len, default=None)
        self.pos += len(found or "")
        return found

    def expect(self, *literals: str) -> Reading[str]:
        """One of the literals, or `Malformed` with nothing read."""
        found = yield from self.match(literals)
        if found is None:
            raise Malformed
        return found

    def until(self, marks: Collection[str], sink: Sink) -> Reading[str | None]:
        """Text into `sink` up to the earliest (then longest) of `marks`, which is read; None at the end of all text.

        Held back is what may still become a mark. `sink` is called with `pos` behind what it is given."""
        pattern = _alternatives(tuple(marks))
        while True:
            found = pattern.search(self.text, self.pos) if marks else None
            undecided = len(self.text) if self.complete else self._undecided(marks)
            stop = min(found.start(), undecided) if found else undecided
            if stop > self.pos:
                piece = self.text[self.pos : stop]
                self.pos = stop
                sink(piece)
            if found and (found.start() < undecided or self.complete):
                self.pos = found.end()
                return found.group()
            if self.complete:
                return None
            if self.mark > COMPACT_AT and not self.pinned:
                self.text = self.text[self.mark :]
                self.pos -= self.mark
                self.mark = 0
            yield

    def _undecided(self, marks: Collection[str]) -> int:
        """Where the earliest text begins that runs to the end of the buffer and may become a mark."""
        beginnings = _beginnings(tuple(marks))
        longest = max(map(len, marks), default=0)
        for start in range(max(self.pos, len(self.text) - longest + 1), len(self.text)):
            if self.text[start:] in beginnings:
                return start
        return len(self.text)


@lru_cache(maxsize=512)
def _alternatives(marks: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(mark) for mark in sorted(marks, key=len, reverse=True)))


@lru_cache(maxsize=512)
def _beginnings(marks: tuple[str, ...]) -> frozenset[str]:
    """Every proper prefix of a mark, but the empty one."""
    return frozenset(mark[:end] for mark in marks for end in range(1, len(mark)))
