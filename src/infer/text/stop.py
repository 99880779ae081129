"""Stop strings over text that arrives in pieces: where the text ends, and what must wait because it may begin a stop.

Runs in the request's task; a `StopMatcher` owns the text that is held back for its choice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

NO_STOP = -1


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string was completed."""

    stop: str
    num_tokens: int
    """Pieces fed up to and including the one that completed the stop: the output tokens to keep."""


class StopStrings:
    """The stops of a request as one automaton (Aho and Corasick, 1975); immutable, shared by its choices.

    A state is a prefix of some stop. Reading a character moves to the longest such prefix that the text now ends with,
    so the work per character does not grow with the number or the length of the stops.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self.next: list[dict[str, int]] = [{}]
        self.fallback = [0]
        self.depth = [0]
        self.completed = [NO_STOP]
        """By state: the first stop in the list that ends here, or NO_STOP."""
        for order, stop in enumerate(self.stops):
            self._insert(stop, order)
        self._link()

    def _insert(self, stop: str, order: int) -> None:
        state = 0
        for char in stop:
            child = self.next[state].get(char)
            if child is None:
                child = self.next[state][char] = len(self.next)
                self.next.append({})
                self.fallback.append(0)
                self.depth.append(self.depth[state] + 1)
                self.completed.append(NO_STOP)
            state = child
        if state and self.completed[state] == NO_STOP:
            self.completed[state] = order

    def _link(self) -> None:
        """By breadth: a state's fallback is the longest shorter suffix that is also a state."""
        queue = deque(self.next[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self.next[state].items():
                fallback = self.advance(self.fallback[state], char)
                self.fallback[child] = fallback
                ends = [order for order in (self.completed[child], self.completed[fallback]) if order != NO_STOP]
                self.completed[child] = min(ends, default=NO_STOP)
                queue.append(child)

    def advance(self, state: int, char: str) -> int:
        while state and char not in self.next[state]:
            state = self.fallback[state]
        return self.next[state].get(char, 0)


class StopMatcher:
    """Feed one piece of text per output token; text comes back as soon as it cannot be part of a stop.

    The stop that completes first wins, and of those that complete at the same character the first in the list.
    Nothing matches inside the first `min_tokens` pieces: their text has passed when matching begins, so a stop that
    starts in them does not count either.
    """

    def __init__(self, stops: Sequence[str] | StopStrings, include_stop: bool = False, *, min_tokens: int = 0) -> None:
        self._stops = stops if isinstance(stops, StopStrings) else StopStrings(stops)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._state = 0
        self._held = ""
        self._num_tokens = 0
        self.match: StopMatch | None = None

    def feed(self, text: str) -> tuple[str, StopMatch | None]:
        """(text to deliver, the match that ends the output or None). After a match nothing more comes."""
        if self.match is not None:
            return "", self.match
        self._num_tokens += 1
        return self._advance(text)

    def finish(self, text: str = "") -> tuple[str, StopMatch | None]:
        """The last text (what the detokenizer held back; it belongs to the last token) and all that was held here."""
        if self.match is not None:
            return "", self.match
        emit, match = self._advance(text)
        if match is None:
            emit, self._held, self._state = emit + self._held, "", 0
        return emit, match

    def _advance(self, text: str) -> tuple[str, StopMatch | None]:
        stops = self._stops
        if not stops.stops or self._num_tokens <= self._min_tokens:
            return text, None
        data, state = self._held + text, self._state
        for end, char in enumerate(text, start=len(self._held) + 1):
            state = stops.advance(state, char)
            if (order := stops.completed[state]) != NO_STOP:
                stop = stops.stops[order]
                self._held = ""
                self.match = StopMatch(stop, self._num_tokens)
                return data[: end if self._include_stop else end - len(stop)], self.match
        self._state = state
        cut = len(data) - stops.depth[state]
        self._held = data[cut:]
        return data[:cut], None
