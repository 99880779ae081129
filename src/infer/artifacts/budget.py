"""Bytes that may be held at the same time, handed out in order of arrival. Used on one event loop; owns the waiting line."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import anyio


@dataclass(slots=True, eq=False)
class _Waiter:
    amount: int
    granted: bool = False
    done: anyio.Event = field(default_factory=anyio.Event)


class ByteBudget:
    """`reserved` never exceeds `total`."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.reserved = 0
        self._line: deque[_Waiter] = deque()
        self._closed = False

    async def acquire(self, amount: int, seconds: float) -> bool:
        """Reserve, waiting at most `seconds`. False: no room came free, or never will. A cancelled wait reserves nothing."""
        if amount > self.total or self._closed:
            return False
        if not self._line and self.reserved + amount <= self.total:
            self.reserved += amount
            return True
        waiter = _Waiter(amount)
        self._line.append(waiter)
        try:
            with anyio.move_on_after(seconds):
                await waiter.done.wait()
        except BaseException:
            self._leave(waiter, give_back=True)
            raise
        self._leave(waiter, give_back=False)
        return waiter.granted

    def close(self) -> None:
        """Nobody waits any more, and nobody is let in."""
        self._closed = True
        for waiter in self._line:
            waiter.done.set()

    def release(self, amount: int) -> None:
        self.reserved -= amount
        self._serve()

    def _leave(self, waiter: _Waiter, *, give_back: bool) -> None:
        if not waiter.granted:
            self._line.remove(waiter)
            self._serve()  # it may have held up smaller ones
        elif give_back:
            self.release(waiter.amount)

    def _serve(self) -> None:
        while self._line and not self._closed and self.reserved + self._line[0].amount <= self.total:
            waiter = self._line.popleft()
            self.reserved += waiter.amount
            waiter.granted = True
            waiter.done.set()
