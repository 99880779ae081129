"""Conformance of a block store: hard cap, references, order of eviction, immutable while retained, all-or-nothing reads.

On the calling thread; every check makes a store of its own and closes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from infer.testing.kits import Check, expect

Make = Callable[[int, int], Any]
"""(object bytes, number of objects) -> an empty store."""
SIZE = 4


def checks(make: Make) -> Iterator[Check]:
    """`make` gives a new `BlockStore` at each call; `put` must answer at once with what it refused."""
    for body in (
        _lru,
        _reads_are_sequences,
        _immutable,
        _hard_cap,
        _tail_dies_first,
        _two_owners,
        _slots_are_reused,
        _retained_before_there,
        _all_or_nothing,
        _discard,
        _copies,
        _atomic,
        _close,
    ):
        yield Check(body.__name__.strip("_"), partial(_run, make, body))


def _run(make: Make, body: Callable[[Make], None]) -> None:
    body(make)


def data(number: int, size: int = SIZE) -> bytes:
    return bytes([number]) * size


def has(store: Any, keys: Sequence[bytes]) -> list[bytes]:
    """Of `keys`, those that can be read. Reading refreshes, so this is for the end of a check."""
    found = []
    for key in keys:
        try:
            store.read([key])
        except Exception:
            continue
        found.append(key)
    return found


def _lru(make: Make) -> None:
    """A read refreshes."""
    store = make(SIZE, 2)
    store.put({b"first": data(1), b"second": data(2)})
    store.read([b"first"])
    expect(store.put({b"third": data(3)}) == [], "a put that can evict was refused")
    expect(has(store, [b"first", b"second", b"third"]) == [b"first", b"third"], "the least recently used must go")
    expect(store.read([b"first", b"third"]) == [data(1), data(3)], "wrong bytes")
    store.close()


def _reads_are_sequences(make: Make) -> None:
    """Of what one read refreshed, the last goes first, as with releases."""
    store = make(SIZE, 2)
    store.put({b"head": data(1), b"tail": data(2)})
    store.read([b"head", b"tail"])
    store.put({b"other": data(3)})
    expect(has(store, [b"head", b"tail"]) == [b"head"], "the tail must go first")
    store.close()


def _immutable(make: Make) -> None:
    """Replaced while nobody holds it, kept while somebody does."""
    store = make(SIZE, 2)
    store.put({b"block": data(1)}, retain=[b"block"])
    store.put({}, release=[b"block"])
    store.put({b"block": data(2)}, retain=[b"block"])
    expect(store.read([b"block"]) == [data(2)], "an object without references was not replaced")
    expect(store.put({b"block": data(3)}) == [], "an ignored put is not a refused one")
    expect(store.read([b"block"]) == [data(2)], "a retained object changed")
    store.close()


def _hard_cap(make: Make) -> None:
    """Retained objects are never evicted, and the store never grows: what finds no room is named."""
    store = make(SIZE, 2)
    store.put({b"kept": data(1), b"unused": data(2)}, retain=[b"kept"])
    refused = store.put({b"first": data(3), b"second": data(4)}, retain=[b"first", b"second"])
    expect(refused == [b"second"], f"refused {refused}, not the second")
    expect(has(store, [b"kept", b"unused", b"first", b"second"]) == [b"kept", b"first"], "the wrong objects are there")
    expect(store.num_objects == 2, "the capacity changed")
    expect(store.put({b"third": data(5)}) == [b"third"], "there was no room")
    store.close()


def _three_retained(make: Make) -> Any:
    store = make(SIZE, 2)
    store.put({b"first": data(1), b"second": data(2)}, retain=[b"first", b"second", b"third"])
    return store


def _tail_dies_first(make: Make) -> None:
    store = _three_retained(make)
    refused = store.put({b"third": data(3)}, release=[b"third", b"second", b"first"])
    expect(refused == [b"third"], f"refused {refused}: the tail was released first, so it is the one to go")
    expect(has(store, [b"first", b"second", b"third"]) == [b"first", b"second"], "the tail must go first")
    store.close()


def _two_owners(make: Make) -> None:
    """As before, but another owner holds the third."""
    store = _three_retained(make)
    store.put({}, retain=[b"third"])
    expect(store.put({b"third": data(3)}, release=[b"third", b"second", b"first"]) == [], "there was room")
    expect(has(store, [b"first", b"second", b"third"]) == [b"first", b"third"], "the second must go")
    store.close()


def _slots_are_reused(make: Make) -> None:
    store = make(SIZE, 3)
    store.put({b"first": data(1), b"second": data(2), b"third": data(3)})
    store.read([b"second"])
    store.put({b"fourth": data(4)})
    names = [b"second", b"third", b"fourth"]
    expect(has(store, [b"first", *names]) == names, "the first must go")
    expect(store.read(names) == [data(2), data(3), data(4)], "an object moved")
    store.close()


def _retained_before_there(make: Make) -> None:
    store = make(SIZE, 1)
    store.put({}, retain=[b"later"])
    store.put({b"later": data(1)})
    expect(store.put({b"other": data(2)}) == [b"other"], "an object retained in advance was evicted")
    expect(store.read([b"later"]) == [data(1)], "wrong bytes")
    store.put({}, release=[b"later"])
    expect(store.put({b"other": data(2)}) == [], "a released object was not evicted")
    store.close()


def _all_or_nothing(make: Make) -> None:
    """A failed read names the key and refreshes nothing."""
    store = make(SIZE, 2)
    store.put({b"first": data(1), b"second": data(2)})
    try:
        store.read([b"first", b"absent"])
    except Exception as error:
        expect(getattr(error, "key", None) == b"absent", f"{error!r} does not name the missing key")
    else:
        raise AssertionError("a read with a missing key gave something")
    store.put({b"third": data(3)})
    expect(has(store, [b"first", b"second"]) == [b"second"], "a failed read refreshed an object")
    expect(store.read([]) == [], "a read of nothing gives nothing")
    store.close()


def _discard(make: Make) -> None:
    """Even what is retained goes; the reference stays, and its owner can give it back."""
    store = make(SIZE, 2)
    store.put({b"held": data(1), b"free": data(2)}, retain=[b"held"])
    store.discard([b"held", b"free", b"absent"])
    expect(has(store, [b"held", b"free"]) == [], "a discarded object can be read")
    store.put({b"held": data(3)})
    expect(store.read([b"held"]) == [data(3)], "a discarded object must come back with new bytes")
    expect(store.put({b"x": data(4), b"y": data(5)}) == [b"y"], "the reference was lost with the bytes")
    store.put({}, release=[b"held"])
    store.close()


def _copies(make: Make) -> None:
    """What was read stays as it was."""
    store = make(SIZE, 1)
    store.put({b"first": data(1)})
    (found,) = store.read([b"first"])
    store.put({b"second": data(2)})
    expect(found == data(1), "bytes that were read changed")
    store.close()
    expect(found == data(1), "bytes that were read are gone with the store")


def _atomic(make: Make) -> None:
    """A batch that breaks the contract changes nothing."""
    store = make(SIZE, 2)
    store.put({b"first": data(1)}, retain=[b"first"])
    wrong: list[tuple[dict[bytes, bytes], list[bytes], list[bytes]]] = [
        ({b"second": data(2), b"short": b"x"}, [], []),
        ({b"second": data(2)}, [b"second"], [b"second", b"second"]),
        ({b"second": data(2)}, [], [b"first", b"first"]),
    ]
    for objects, retain, release in wrong:
        try:
            store.put(objects, retain, release)
        except Exception as error:
            expect(str(error), "an error without words")
        else:
            raise AssertionError(f"put({objects}, retain={retain}, release={release}) was accepted")
        expect(has(store, [b"first", b"second"]) == [b"first"], "half of a wrong batch was applied")
    store.put({}, release=[b"first"])
    store.close()


def _close(make: Make) -> None:
    store = make(SIZE, 1)
    store.close()
    store.close()
    calls: list[Callable[[], object]] = [
        lambda: store.put({b"x": data(1)}),
        lambda: store.read([]),
        lambda: store.discard([b"x"]),
    ]
    for call in calls:
        try:
            call()
        except Exception as error:
            expect("closed" in str(error), f"{error!r} does not say that the store is closed")
        else:
            raise AssertionError("a closed store can be used")
