"""The order in which requests are admitted and the order in which they lose: one key serves both.

Runs in the loop task; owns the waiting queue.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from infer.engine.request import Request

_key = attrgetter("sort_key")


class WaitingQueue:
    """Waiting requests in order of their sort key: fcfs (0, arrival), priority (priority, arrival); smaller first.

    A preempted request keeps its key, so it returns to its old place.
    """

    def __init__(self, policy: str) -> None:
        self._by_priority = policy == "priority"
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __getitem__(self, index: int) -> Request:
        return self._requests[index]

    def push(self, request: Request) -> None:
        request.sort_key = (request.priority if self._by_priority else 0, request.arrival)
        insort(self._requests, request, key=_key)

    def discard(self, request: Request) -> None:
        """Take the request out if it is here. Keys are unique (arrivals are): found by bisection."""
        index = bisect_left(self._requests, request.sort_key, key=_key)
        if index < len(self._requests) and self._requests[index] is request:
            del self._requests[index]


def victim(candidates: list[Request], *, spare_prefilling: bool) -> Request:
    """Who gives back its blocks: the last in admission order; with `spare_prefilling`, a decoding one if there is any."""
    if spare_prefilling:
        decoding = [request for request in candidates if not request.is_prefilling]
        candidates = decoding or candidates
    return max(candidates, key=_key)
