"""The order in which requests are admitted and the order in which they lose: one key serves both.

Runs in the loop task; owns the waiting queue.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from operator import attrgetter

from infer.engine.request import Request

MAX_OVERTAKEN = 64
"""With "longest_prefix": once so many later requests were admitted before a waiting one, nobody passes it any more."""
PREFIX_WINDOW = 64
"""With "longest_prefix": requests at the head of the queue that are compared, each time one is admitted."""

_key = attrgetter("sort_key")


class WaitingQueue:
    """Waiting requests in order of their sort key: fcfs (0, arrival), priority (priority, arrival); smaller first.

    A preempted request keeps its key, so it returns to its old place. With "longest_prefix" the queue is that of fcfs, and
    who finds most of its tokens in the prefix cache goes first: `next_up`.
    """

    def __init__(self, policy: str, cached_tokens: Callable[[Request], int] | None = None) -> None:
        """`cached_tokens`: how many a request would find in the prefix cache now; asked with "longest_prefix" only."""
        self._by_priority = policy == "priority"
        self._cached_tokens = cached_tokens if policy == "longest_prefix" else None
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __getitem__(self, index: int) -> Request:
        return self._requests[index]

    def next_up(self, index: int = 0) -> Request:
        """The request to be admitted next; with an index, after so many that were passed over in this round.

        Longest cached beginning first, equal ones in order of arrival; those that were overtaken too often before all.
        """
        if self._cached_tokens is None or index >= PREFIX_WINDOW:
            return self._requests[index]
        head = self._requests[:PREFIX_WINDOW]
        cached = self._cached_tokens
        tired = [request for request in head if request.num_overtaken >= MAX_OVERTAKEN]
        if index < len(tired):
            return tired[index]
        others = [request for request in head if request.num_overtaken < MAX_OVERTAKEN]
        return sorted(others, key=lambda request: -cached(request))[index - len(tired)]

    def push(self, request: Request) -> None:
        request.sort_key = (request.priority if self._by_priority else 0, request.arrival)
        insort(self._requests, request, key=_key)

    def admit(self, request: Request) -> None:
        """Take out a request that is admitted, and count it for those it passed."""
        self.discard(request)
        if self._cached_tokens is not None:
            for passed in self._requests[: bisect_left(self._requests, request.sort_key, key=_key)]:
                passed.num_overtaken += 1

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
