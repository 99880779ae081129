"""Notices when an answer loops: the same few tokens, over and over.

Runs in the loop task; one detector per choice, which owns it. Knows token ids only.
"""

from __future__ import annotations

from collections import deque

from infer.options import RepetitionDetection


class RepetitionDetector:
    """Told of every output token once, in order. Takes time for the token's earlier places within the longest pattern
    only, so ordinary text costs next to nothing.

    An answer ends in `c` copies of a pattern of `p` tokens exactly when each of its last `p * (c - 1)` tokens equals the
    one `p` places before it: that run is counted per pattern size.
    """

    def __init__(self, rule: RepetitionDetection) -> None:
        self._rule = rule
        self._count = 0
        self._places: dict[int, deque[int]] = {}
        """Token id -> where it was, within reach of the longest pattern."""
        self._runs: dict[int, int] = {}
        """Pattern size -> how many tokens, up to the last, equal the one so many places before."""

    def feed(self, token_id: int) -> bool:
        """Take the next token in; whether the answer loops with it."""
        rule, here = self._rule, self._count
        self._count += 1
        places = self._places.setdefault(token_id, deque())
        while places and here - places[0] > rule.max_pattern_size:
            places.popleft()
        sizes = [here - place for place in places if here - place >= rule.min_pattern_size]
        places.append(here)
        self._runs = {size: self._runs.get(size, 0) + 1 for size in sizes}
        return any(run >= size * (rule.min_count - 1) for size, run in self._runs.items())
