"""Conformance of a storage target: whole objects or none, never over an existing one, whatever fails or is cancelled.

Each check makes its own event loop, on asyncio and on trio, and works inside one directory; owns nothing.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from infer.errors import StorageError, StorageNotFoundError
from infer.plugins.registry import import_reference
from infer.plugins.storage_target import StorageTarget, StorageTargetSpec, SupportsRead
from infer.testing.kits import Check, expect, load
from infer.testing.kits._storage_machine import Faults, Machine, Make, cancelled_at

WRITERS = 8
RUNS, OPERATIONS = 6, 25
"""Sequences of the state machine, and their length."""
MOST_WAITS = 30


def checks(spec: StorageTargetSpec, directory: Path, faults: Faults | None = None) -> Iterator[Check]:
    """`{tmp}` in the example's uri stands for the directory. Every check writes objects of its own.

    faults: makes the place fail that objects are stored at, else the example's "faults" ("module:attr"); without either, a
    failing store is not tried.
    """
    uri, options = spec.example["uri"], spec.example.get("options", {})
    if faults is None and "faults" in spec.example:
        faults = import_reference(spec.example["faults"])
    number = itertools.count()

    def run(body: Callable[[Make], Awaitable[None]], backend: str) -> None:
        root = directory / str(next(number))

        def make(name: str) -> StorageTarget:
            target: StorageTarget = load(spec)(f"{uri.replace('{tmp}', str(root))}{name}", dict(options))
            return target

        anyio.run(body, make, backend=backend)

    readable = (_reads_back, _missing, _deletes)
    probe = load(spec)(f"{uri.replace('{tmp}', str(directory / 'probe'))}probe", dict(options))
    put: Any = _put_once if spec.example.get("create_only") else _put
    machine = partial(_state_machine, faults, not spec.example.get("create_only"))
    bodies: dict[str, Any] = {"state_machine": machine, "cancelled_anywhere": _cancelled_anywhere}
    always: tuple[Any, ...] = (put, _keeps_existing, _one_winner, _closes_twice)
    for body in always + (readable if isinstance(probe, SupportsRead) else ()):
        bodies[body.__name__.strip("_")] = body
    yield Check("leaves_its_options_alone", partial(_options, spec, directory))
    for name, body in bodies.items():
        for backend in ("asyncio", "trio"):
            yield Check(f"{name}[{backend}]", partial(run, body, backend))


def _options(spec: StorageTargetSpec, directory: Path) -> None:
    """They are those of a profile, which many deliveries share."""
    options = {**spec.example.get("options", {})}
    before = copy.deepcopy(options)
    load(spec)(f"{spec.example['uri'].replace('{tmp}', str(directory / 'options'))}x", options)
    expect(options == before, f"the factory changes its options from {before} to {options}")


async def _state_machine(faults: Faults | None, replaces: bool, make: Make) -> None:
    """Drawn sequences of everything that can happen, beside a dictionary."""

    def named(seed: int, name: str) -> StorageTarget:
        return make(f"{seed}-{name}")

    for seed in range(RUNS):
        await Machine(partial(named, seed), faults, replaces=replaces, seed=seed).run(OPERATIONS)


async def _cancelled_anywhere(make: Make) -> None:
    """A put that is cancelled at its first wait, its second, and so on: all of the object is there, or none."""
    data = b"x" * 200_000
    for number in range(1, MOST_WAITS):
        name = f"cancelled-{number}"
        target = make(name)
        with anyio.CancelScope() as scope:
            await cancelled_at(target.put(data, if_absent=True), number, scope.cancel)
        await target.aclose()
        reader = make(name)
        if isinstance(reader, SupportsRead):
            try:
                found = await reader.get()
            except StorageNotFoundError:
                found = data
            expect(found == data, f"a put that was cancelled at wait {number} left {len(found)} of {len(data)} bytes")
        await reader.aclose()
        if not scope.cancel_called:
            return


async def _put(make: Make) -> None:
    """An empty and a large object are stored; without if_absent the last one wins."""
    target = make("put")
    await target.put(b"", if_absent=True)
    await target.put(b"x" * 300_000, if_absent=False)
    if isinstance(target, SupportsRead):
        expect(await target.get() == b"x" * 300_000, "put(if_absent=False) did not replace the object")
    await target.aclose()


async def _put_once(make: Make) -> None:
    """A large object is stored; a target that can only create refuses to do anything else."""
    target = make("put")
    await target.put(b"x" * 300_000, if_absent=True)
    try:
        await make("other").put(b"x", if_absent=False)
    except StorageError as error:
        expect(str(error), "the error of a refused replacement has no message")
    else:
        raise AssertionError("put(if_absent=False) of a create-only target did not raise StorageError")
    await target.aclose()


async def _keeps_existing(make: Make) -> None:
    first, second = make("kept"), make("kept")
    await first.put(b"first", if_absent=True)
    try:
        await second.put(b"second, longer", if_absent=True)
    except StorageError as error:
        expect(str(error), "the error of an existing object has no message")
        expect(not error.retryable, "the error of an existing object says that a retry may succeed")
    else:
        raise AssertionError("put(if_absent=True) on an existing object did not raise StorageError")
    if isinstance(first, SupportsRead):
        expect(await first.get() == b"first", "a refused put changed the object")
    await first.aclose()
    await second.aclose()


async def _one_winner(make: Make) -> None:
    """Of many writers at once exactly one succeeds, and its object is whole."""
    winners: list[bytes] = []

    async def write(index: int) -> None:
        target, data = make("race"), bytes([index]) * 50_000
        try:
            await target.put(data, if_absent=True)
        except StorageError:
            pass
        else:
            winners.append(data)
        await target.aclose()

    async with anyio.create_task_group() as tasks:
        for index in range(WRITERS):
            tasks.start_soon(write, index)
    expect(len(winners) == 1, f"{len(winners)} of {WRITERS} writers with if_absent=True succeeded; exactly one may")
    reader = make("race")
    if isinstance(reader, SupportsRead):
        expect(await reader.get() == winners[0], "the object is not what the one successful writer stored")
    await reader.aclose()


async def _closes_twice(make: Make) -> None:
    target = make("closed")
    await target.aclose()
    await target.aclose()


async def _reads_back(make: Make) -> None:
    target = _readable(make("read"))
    data = bytes(range(256)) * 5
    await target.put(data, if_absent=True)
    expect(await target.get() == data, "get() is not what was put")
    expect(await target.get(10, 300) == data[10:300], "get(10, 300) is not bytes 10 to 299")
    expect(await target.get(1000) == data[1000:], "get(1000) is not the rest from byte 1000")
    expect(await target.exists(), "exists() is false for a stored object")
    expect(any(name.endswith("read") for name in await target.list()), "list() lacks a stored object")
    await target.aclose()


async def _missing(make: Make) -> None:
    target = _readable(make("missing"))
    expect(not await target.exists(), "exists() is true for an object that was never stored")
    try:
        await target.get()
    except StorageNotFoundError:
        pass
    else:
        raise AssertionError("get() of an object that was never stored did not raise StorageNotFoundError")
    await target.aclose()


async def _deletes(make: Make) -> None:
    target = _readable(make("deleted"))
    await target.put(b"x", if_absent=True)
    await target.delete()
    expect(not await target.exists(), "a deleted object still exists")
    await target.put(b"y", if_absent=True)
    expect(await target.get() == b"y", "an object cannot be stored again after delete")
    await target.aclose()


def _readable(target: Any) -> Any:
    """Both protocols at once have no type of their own."""
    return target
