"""Which objects (rows of one KV block) the worker's store is told to keep, so that no retained object is ever refused.

Runs in the loop task; owns the retained set and the changes of it that the next plan carries.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

Key = tuple[str, bytes, int]
"""(field, KV block hash, weight version)."""

_SCAN = 32
"""Oldest idle objects looked at for one whose KV block is gone, before the very oldest has to go."""


@dataclass(slots=True, eq=False)
class RetainedObject:
    """An object that the store keeps: pinned by captures, or idle and kept as long as there is room."""

    key: Key
    pins: int = 0
    retained: bool = True
    there: bool = True
    """False: the store said that it is not. Who counts on it already may still find it, so it is kept as long."""
    since: int = 0
    """The step that last published it."""


class RetainedObjects:
    """Per field at most its capacity. Idle objects leave oldest first, those whose KV block is gone before the others."""

    def __init__(self, capacities: Mapping[str, int], is_cached: Callable[[bytes], bool]) -> None:
        self.weight_version = 0
        self.step_id = 0
        """The step being planned."""
        self._capacities = capacities
        self._is_cached = is_cached
        self._objects: dict[Key, RetainedObject] = {}
        self._num: dict[str, int] = dict.fromkeys(capacities, 0)
        self._idle: dict[str, OrderedDict[Key, RetainedObject]] = {field: OrderedDict() for field in capacities}
        self._changes: dict[Key, int] = {}
        self._discarded: dict[Key, None] = {}

    def __len__(self) -> int:
        return len(self._objects)

    def __contains__(self, key: Key) -> bool:
        found = self._objects.get(key)
        return found is not None and found.there

    @property
    def num_pinned(self) -> int:
        return len(self._objects) - sum(len(idle) for idle in self._idle.values())

    def publish(self, key: Key) -> RetainedObject | None:
        """Pin an object that the step being planned brings."""
        found = self.pin(key)
        if found is not None:
            found.there, found.since = True, self.step_id
        return found

    def pin(self, key: Key) -> RetainedObject | None:
        """Keep the object until `unpin`; None when everything kept is pinned and there is no room for one more."""
        found = self._objects.get(key)
        if found is None:
            field = key[0]
            if self._num[field] >= self._capacities[field] and not self._evict(field):
                return None
            found = self._objects[key] = RetainedObject(key)
            self._num[field] += 1
            self._change(key, 1)
        elif not found.pins:
            del self._idle[key[0]][key]
        found.pins += 1
        return found

    def unpin(self, found: RetainedObject) -> None:
        """The last pin gone, the object stays as the youngest idle one if its KV block can still be hit."""
        if not found.retained:
            return
        found.pins -= 1
        if found.pins:
            return
        if found.there and self._is_cached(found.key[1]):
            self._idle[found.key[0]][found.key] = found
        else:
            self._drop(found)

    def discard(self, keys: Iterable[Key], *, even_pinned: bool = True) -> None:
        """The store must lose these bytes, whether it was told to keep them or not."""
        for key in keys:
            found = self._objects.get(key)
            if found is not None and found.pins and not even_pinned:
                continue
            if found is not None:
                self._idle[key[0]].pop(key, None)
                self._drop(found)
            self._discarded[key] = None

    def missing(self, key: Key, step_id: int) -> None:
        """The store says, in the result of that step, that it does not have this object: nobody is to count on it any more.
        Should the word be late and the object there by now, its being computed once more is all that is lost."""
        found = self._objects.get(key)
        if found is None or found.since > step_id:
            return
        found.there = False
        if not found.pins:
            del self._idle[key[0]][key]
            self._drop(found)

    def has_changes(self) -> bool:
        return bool(self._changes or self._discarded)

    def take_changes(self) -> tuple[list[Key], list[Key], list[Key]]:
        """(retain, release, discard) since the last call; a key is in one of the first two at most."""
        retain = [key for key, change in self._changes.items() if change > 0]
        release = [key for key, change in self._changes.items() if change < 0]
        discard = list(self._discarded)
        self._changes = {}
        self._discarded = {}
        return retain, release, discard

    def _evict(self, field: str) -> bool:
        """Give up one idle object of the field."""
        idle = self._idle[field]
        if not idle:
            return False
        oldest = next(iter(idle))
        for _, key in zip(range(_SCAN), idle, strict=False):
            if key[2] != self.weight_version or not self._is_cached(key[1]):
                oldest = key
                break
        self._drop(idle.pop(oldest))
        return True

    def _drop(self, found: RetainedObject) -> None:
        found.retained = False
        del self._objects[found.key]
        self._num[found.key[0]] -= 1
        self._change(found.key, -1)

    def _change(self, key: Key, by: int) -> None:
        """What was retained and released between two plans is not told."""
        change = self._changes.pop(key, 0) + by
        if change:
            self._changes[key] = change
