"""Captured rows of complete KV blocks, kept for the requests whose prompts reuse those blocks.

Called by one thread; owns an arena of fixed-size objects that never grows and, if shared, leaves nothing behind.
"""

from __future__ import annotations

import logging
import mmap
import os
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Protocol

from infer.config.units import format_bytes
from infer.errors import ConfigError, EngineError

logger = logging.getLogger("infer.engine.worker")


class BlockStoreError(EngineError):
    """The store was used against its contract, is closed, or broke."""


class MissingBlockError(BlockStoreError):
    """An object that was to be read is not there. `key` names the first one."""

    def __init__(self, message: str, *, key: bytes) -> None:
        super().__init__(message)
        self.key = key


class BlockStore(Protocol):
    """Objects of one size by key, never more than `num_objects`."""

    object_bytes: int
    num_objects: int

    def put(
        self, objects: Mapping[bytes, bytes], retain: Sequence[bytes] = (), release: Sequence[bytes] = ()
    ) -> list[bytes]:
        """One atomic batch -> keys that found no room. `retain` counts a reference, also of what is not there yet;
        `release` gives one back, last block of a sequence first: in that order objects without references are evicted.
        What was retained and there before this call keeps its bytes; anything else is replaced. While no more is retained
        than fits, nothing retained is refused."""
        ...

    def read(self, keys: Sequence[bytes]) -> list[bytes]:
        """Copies, all or none: raises `MissingBlockError`."""
        ...

    def discard(self, keys: Sequence[bytes]) -> None:
        """Remove objects, retained or not. References stay counted until they are released."""
        ...

    def close(self) -> None:
        """Free the memory; a second call does nothing, any other is an error."""
        ...


class SlotStore(ABC):
    """Everything about a `BlockStore` but where the bytes of a slot are: that is the backing's."""

    def __init__(self, object_bytes: int, num_objects: int) -> None:
        self.object_bytes = object_bytes
        self.num_objects = num_objects
        self._closed = False
        self._slots: dict[bytes, int] = {}
        self._references: dict[bytes, int] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        """Objects without references, the next to be evicted first."""
        self._free: list[int] = []
        self._num_touched = 0
        self._warned = False

    def put(
        self, objects: Mapping[bytes, bytes], retain: Sequence[bytes] = (), release: Sequence[bytes] = ()
    ) -> list[bytes]:
        self._check_open()
        self._check(objects, retain, release)
        writes = [key for key in objects if not (key in self._slots and key in self._references)]
        pending = {key for key in writes if key not in self._slots}
        for key in retain:
            self._references[key] = self._references.get(key, 0) + 1
            self._idle.pop(key, None)
        released = self._release(release, pending)
        # What is retained comes first: whoever retains no more than fits is never refused.
        kept = [key for key in writes if key in self._references]
        refused = [key for key in kept if not self._write(key, objects[key], pending)]
        # What else this call writes is not evicted by it, unless its owner let go of it in this very call.
        others = [key for key in writes if key not in self._references]
        shielded = [key for key in others if key not in released]
        for key in shielded:
            self._idle.pop(key, None)
        refused += [key for key in others if not self._write(key, objects[key], pending)]
        for key in shielded:
            if key in self._slots:
                self._idle[key] = None
        # What was let go of in this call is only the first to leave, as it would be later.
        if not self._warned and not released.issuperset(refused):
            self._warned = True
            logger.warning(
                "the store of captured rows is full (%d blocks): rows of further blocks are not kept, so prompts that "
                "reuse these blocks are computed again; raise capture.max_bytes",
                self.num_objects,
            )
        return refused

    def read(self, keys: Sequence[bytes]) -> list[bytes]:
        self._check_open()
        for key in keys:
            if key not in self._slots:
                raise MissingBlockError(f"no captured rows are kept under key {key.hex()}", key=key)
        found = [self._load(key, self._slots[key]) for key in keys]
        for key in reversed(keys):  # as for releases: the last block of a sequence is the first to go
            if key in self._idle:
                self._idle.move_to_end(key)
        return found

    def discard(self, keys: Sequence[bytes]) -> None:
        self._check_open()
        for key in keys:
            slot = self._slots.pop(key, None)
            if slot is not None:
                self._free.append(slot)
                self._idle.pop(key, None)
                self._erase(key)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._free_backing()
            self._slots.clear()
            self._references.clear()
            self._idle.clear()

    @abstractmethod
    def _save(self, key: bytes, slot: int, data: bytes) -> None:
        """Raises `OSError` when the backing takes no more."""

    @abstractmethod
    def _load(self, key: bytes, slot: int) -> bytes:
        """A copy. Raises `MissingBlockError` when somebody else removed it."""

    @abstractmethod
    def _erase(self, key: bytes) -> None:
        """The object is gone: its bytes need not be kept."""

    @abstractmethod
    def _free_backing(self) -> None: ...

    def _check_open(self) -> None:
        if self._closed:
            raise BlockStoreError("the store of captured rows is closed")

    def _check(self, objects: Mapping[bytes, bytes], retain: Sequence[bytes], release: Sequence[bytes]) -> None:
        """Before anything changes."""
        for key, data in objects.items():
            if len(data) != self.object_bytes:
                raise BlockStoreError(f"object {key.hex()} has {len(data)} bytes, all here have {self.object_bytes}")
        if not release:
            return
        counts: dict[bytes, int] = {}
        for key in retain:
            counts[key] = counts.get(key, 0) + 1
        for key in release:
            counts[key] = counts.get(key, 0) - 1
            if self._references.get(key, 0) + counts[key] < 0:
                raise BlockStoreError(f"object {key.hex()} is released more often than it was retained")

    def _release(self, release: Sequence[bytes], pending: set[bytes]) -> set[bytes]:
        """Give references back -> keys that have none any more and exist, or are about to."""
        released = set()
        for key in release:
            count = self._references[key] - 1
            if count:
                self._references[key] = count
                continue
            del self._references[key]
            if key in self._slots or key in pending:
                self._idle[key] = None
                released.add(key)
        return released

    def _write(self, key: bytes, data: bytes, pending: set[bytes]) -> bool:
        slot = self._slots.get(key)
        if slot is None:
            slot = self._take_slot(key, pending)
        if slot is None:
            return False
        try:
            self._save(key, slot, data)
        except OSError as error:  # what was there under this key is not what was put
            if not self._warned:
                self._warned = True
                logger.warning("captured rows cannot be written, so they are not kept for reuse: %s", error)
            self._slots.pop(key, None)
            self._idle.pop(key, None)
            self._free.append(slot)
            self._erase(key)
            return False
        self._slots[key] = slot
        return True

    def _take_slot(self, key: bytes, pending: set[bytes]) -> int | None:
        """A slot for `key`, if need be the one of the object that is due. None: the due one is `key` itself, or all
        that is here is retained."""
        if key not in pending:  # it was due before, when another object of this call needed a slot
            return None
        pending.discard(key)
        if self._free:
            return self._free.pop()
        if self._num_touched < self.num_objects:
            self._num_touched += 1
            return self._num_touched - 1
        while self._idle:
            due, _ = self._idle.popitem(last=False)
            if due == key:
                return None
            if due in pending:
                pending.discard(due)
                continue
            slot = self._slots.pop(due)
            self._erase(due)
            return slot
        return None


class ArenaStore(SlotStore):
    """A `BlockStore` in one mapping; its pages cost nothing until objects are written to them."""

    def __init__(self, memory: mmap.mmap, object_bytes: int, num_objects: int) -> None:
        """Adopts `memory` of at least object_bytes * num_objects bytes."""
        super().__init__(object_bytes, num_objects)
        self._memory = memory

    def _save(self, key: bytes, slot: int, data: bytes) -> None:
        self._memory[slot * self.object_bytes : (slot + 1) * self.object_bytes] = data

    def _load(self, key: bytes, slot: int) -> bytes:
        return self._memory[slot * self.object_bytes : (slot + 1) * self.object_bytes]

    def _erase(self, key: bytes) -> None:
        """The slot is written over."""

    def _free_backing(self) -> None:
        self._memory.close()


def private_store(object_bytes: int, num_objects: int) -> ArenaStore:
    """In memory of this process."""
    memory = mmap.mmap(-1, object_bytes * num_objects, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return ArenaStore(memory, object_bytes, num_objects)


def shared_store(object_bytes: int, num_objects: int, free_bytes: int) -> ArenaStore:
    """In anonymous shared memory: it has no name, so that it goes with the last process that holds it, however that ends.

    The pages are reserved here. Raises `ConfigError` when `free_bytes` (what the platform has left) or the operating
    system does not allow it: without a reservation a later write could kill the process.
    """
    size = object_bytes * num_objects
    reason = None
    if not hasattr(os, "memfd_create"):
        reason = "this operating system has no anonymous shared memory (memfd_create)"
    elif size > free_bytes:
        reason = f"the store takes {format_bytes(size)} and {format_bytes(free_bytes)} are free"
    if reason is None:
        descriptor = os.memfd_create("infer-rows", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, size)
            return ArenaStore(mmap.mmap(descriptor, size), object_bytes, num_objects)
        except OSError as error:
            reason = f"{format_bytes(size)} cannot be reserved: {error}"
        finally:
            os.close(descriptor)
    raise ConfigError(
        f"capture.shared_memory=True: {reason}; lower capture.max_bytes, or set it to False",
        fields=("capture.shared_memory", "capture.max_bytes"),
    )
