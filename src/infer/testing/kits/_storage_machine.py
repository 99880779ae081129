"""A storage target against a dictionary: drawn sequences of writes, reads, deletions, faults and cancellations.

Runs in the event loop of the check that calls it; owns the model. Part of the kit of storage targets.
"""

from __future__ import annotations

import random
import types
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal, TypeVar

import anyio
import anyio.lowlevel

from infer.errors import StorageError, StorageNotFoundError
from infer.plugins.storage_target import StorageTarget, SupportsRead
from infer.testing.kits import expect

Make = Callable[[str], StorageTarget]
"""A target by object name; the same name is the same object."""
Fault = Literal["error", "partial"]
"""What is wrong with the place that objects are stored at: it refuses every write, or takes a part of the bytes (at most 64 KiB)
and then fails."""
Faults = Callable[[Fault], AbstractContextManager[None]]
"""Makes it so, until the context is left."""
T = TypeVar("T")

OPERATIONS = (
    "create",
    "create",
    "replace",
    "read",
    "range",
    "exists",
    "list",
    "delete",
    "cancel",
    "error",
    "partial",
    "race",
)
LARGE = 200_000
"""Bytes; more than a fault lets through."""


class Machine:
    """One run. `model` holds what must be there; `unknown` what a cancelled write may or may not have left, late or never."""

    def __init__(self, make: Make, faults: Faults | None, *, replaces: bool, seed: int) -> None:
        self._make = make
        self._faults = faults
        self._replaces = replaces
        self._draw = random.Random(seed)
        self._fresh = 0
        self.model: dict[str, bytes] = {}
        self.unknown: dict[str, tuple[bytes | None, bytes]] = {}
        self.told: list[str] = []
        """The operations so far, for the message of a failure."""

    async def run(self, operations: int) -> None:
        for _ in range(operations):
            operation = self._draw.choice(OPERATIONS)
            name = self._name()
            self.told.append(f"{operation} {name}")
            try:
                await getattr(self, f"_{operation}")(name)
            except AssertionError as error:
                raise AssertionError(f"{error}; after {', '.join(self.told)}") from error
        await self._settle()

    def _name(self) -> str:
        """One of a few; a name that a cancelled write made unknown is not used again."""
        name = f"{self._draw.choice('abcd')}{self._fresh}"
        if name in self.unknown:
            self._fresh += 1
        return name if name not in self.unknown else self._name()

    def _data(self, size: int | None = None) -> bytes:
        return self._draw.randbytes(self._draw.choice((0, 1, 1000, LARGE)) if size is None else size)

    async def _using(self, name: str, work: Callable[[Any], Awaitable[T]]) -> T:
        """As a delivery does it: a target of its own, closed behind it."""
        target = self._make(name)
        try:
            return await work(target)
        finally:
            await target.aclose()

    async def _put(self, name: str, data: bytes, *, if_absent: bool) -> StorageError | None:
        try:
            await self._using(name, lambda target: target.put(data, if_absent=if_absent))
        except StorageError as error:
            return error
        return None

    async def _create(self, name: str) -> None:
        data = self._data()
        error = await self._put(name, data, if_absent=True)
        if name in self.model:
            expect(error is not None, f"put(if_absent=True) replaced {name}, which was there")
        else:
            expect(error is None, f"put(if_absent=True) of {name}, which is not there, is refused: {error}")
            self.model[name] = data
        await self._check(name)

    async def _replace(self, name: str) -> None:
        if not self._replaces:
            return
        data = self._data()
        error = await self._put(name, data, if_absent=False)
        expect(error is None, f"put(if_absent=False) of {name} is refused: {error}")
        self.model[name] = data
        await self._check(name)

    async def _check(self, name: str) -> None:
        await self._using(name, lambda target: self._compare(name, target))

    _read = _check

    async def _compare(self, name: str, target: Any) -> None:
        if not isinstance(target, SupportsRead):
            return
        try:
            found: bytes | None = await target.get()
        except StorageNotFoundError:
            found = None
        expect(found == self.model.get(name), f"{name} holds {_short(found)}, not {_short(self.model.get(name))}")

    async def _range(self, name: str) -> None:
        async def work(target: Any) -> None:
            if isinstance(target, SupportsRead) and self.model.get(name):
                start = self._draw.randrange(len(self.model[name]))
                end = self._draw.randint(start + 1, len(self.model[name]))
                found = await target.get(start, end)
                wanted = self.model[name][start:end]
                expect(found == wanted, f"bytes {start} to {end} of {name} are {_short(found)}, not {_short(wanted)}")

        await self._using(name, work)

    async def _exists(self, name: str) -> None:
        async def work(target: Any) -> None:
            if isinstance(target, SupportsRead):
                found = await target.exists()
                expect(found is (name in self.model), f"exists() of {name} is {found}")

        await self._using(name, work)

    async def _list(self, name: str) -> None:
        """What is there is listed, if a thing is there at all."""

        async def work(target: Any) -> None:
            if isinstance(target, SupportsRead) and name in self.model:
                listed = await target.list()
                expect(any(found.endswith(name) for found in listed), f"list() lacks {name}: {listed[:5]}")

        await self._using(name, work)

    async def _delete(self, name: str) -> None:
        async def work(target: Any) -> None:
            if isinstance(target, SupportsRead) and name in self.model:
                await target.delete()
                del self.model[name]

        await self._using(name, work)
        await self._check(name)

    async def _cancel(self, name: str) -> None:
        """At one of its awaits. The write may still come to its end, or not; it is never half of one."""
        if name in self.model and not self._replaces:
            return
        data, before = self._data(LARGE), self.model.pop(name, None)
        self.unknown[name] = (before, data)
        with anyio.CancelScope() as scope:
            at = self._draw.randint(1, 12)
            await self._using(
                name, lambda target: cancelled_at(target.put(data, if_absent=before is None), at, scope.cancel)
            )

    async def _race(self, name: str) -> None:
        """Some writers at once, each delayed at its awaits: without an object exactly one creates it."""
        written: list[bytes] = []

        async def write(data: bytes) -> None:
            delays = [self._draw.randrange(4) for _ in range(8)]
            if await delayed(self._put(name, data, if_absent=True), delays) is None:
                written.append(data)

        async with anyio.create_task_group() as tasks:
            for number in range(3):
                tasks.start_soon(write, bytes([number]) * 5000)
        wanted = 0 if name in self.model else 1
        expect(len(written) == wanted, f"{len(written)} of 3 writers created {name}, not {wanted}")
        self.model |= dict.fromkeys([name], written[0]) if written else {}
        await self._check(name)

    async def _error(self, name: str, fault: Fault = "error") -> None:
        """The caller is told, what was there stays, and the same write goes through once the fault is over."""
        if self._faults is None:
            return
        if_absent = name not in self.model
        if not if_absent and not self._replaces:
            return
        data = self._data(LARGE)
        with self._faults(fault):
            error = await self._put(name, data, if_absent=if_absent)
        expect(error is not None, f"put of {name} did not raise, though the write failed ({fault})")
        await self._check(name)
        again = await self._put(name, data, if_absent=if_absent)
        expect(again is None, f"put of {name} is refused after the fault ({fault}) is over: {again}")
        self.model[name] = data
        await self._check(name)

    async def _partial(self, name: str) -> None:
        await self._error(name, "partial")

    async def _settle(self) -> None:
        """Of cancelled writes: the old object or the new one, whole; looked at more than once, since they may end late."""
        for name, (before, data) in self.unknown.items():
            for _ in range(3):
                found = await self._using(name, self._whole)
                whole = found in (before, data) or found is ...
                expect(whole, f"a cancelled put of {name} left {_short(found)}; it may leave all of an object or none")
                await anyio.sleep(0.001)

    async def _whole(self, target: Any) -> Any:
        if not isinstance(target, SupportsRead):
            return ...
        try:
            return await target.get()
        except StorageNotFoundError:
            return None


@types.coroutine
def cancelled_at(work: Any, number: int, cancel: Callable[[], None]) -> Generator[Any, Any, Any]:
    """Await `work`, and call `cancel` when it waits for the `number`-th time."""

    def before(waits: int) -> None:
        if waits == number:
            cancel()

    return (yield from _stepped(work, before, lambda waits: 0))


@types.coroutine
def delayed(work: Any, delays: Sequence[int]) -> Generator[Any, Any, Any]:
    """Await `work`, and let others run that many turns behind each time it has waited."""
    return (yield from _stepped(work, lambda waits: None, lambda waits: delays[waits % len(delays)]))


def _stepped(work: Any, before: Callable[[int], None], turns: Callable[[int], int]) -> Generator[Any, Any, Any]:
    """Drive a coroutine from one wait to the next; what it waits for is passed on to the event loop."""
    waits, step = 0, partial(work.send, None)
    while True:
        try:
            waited_for = step()
        except StopIteration as end:
            return end.value
        waits += 1
        before(waits)
        try:
            answer = yield waited_for
            for _ in range(turns(waits)):
                yield from anyio.lowlevel.checkpoint().__await__()
        except BaseException as error:
            step = partial(work.throw, error)
        else:
            step = partial(work.send, answer)


def _short(data: Any) -> str:
    return (
        f"{len(data)} bytes {data[:8]!r}" if isinstance(data, bytes) else "nothing" if data is None else repr(data)[:80]
    )
