"""What happens before what, on queues that know nothing of each other: finds accesses to memory that nothing orders.

For tests; used from one thread, the "host". Owns the record of every storage that it was told of.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

Known = dict[str, int]
"""Queue -> how far it has come, as somebody knows."""


class OrderError(Exception):
    """Two uses of memory that could come in the wrong order on a real device."""


@dataclass(slots=True)
class Memory:
    """One storage. Uses are (queue, place in it)."""

    label: str
    owner: str
    """The queue whose next tensor may get it when it is freed; "" for memory of the host."""
    write: tuple[str, int] | None = None
    reads: Known = field(default_factory=dict)


class Queue:
    def __init__(self, name: str) -> None:
        self.name = name
        self.length = 0
        self.known: Known = {}
        """What its next operation comes after."""
        self.freed: list[tuple[str, tuple[str, int]]] = []
        """Memory that its next operation may get, and uses that must be over then."""


class Order:
    """Vector clocks over queues, and the last uses of each storage."""

    def __init__(self) -> None:
        self.host: Known = {}
        """How far the host has waited for each queue. What is queued later comes after that."""
        self.errors: list[OrderError] = []
        self._memory: dict[int, Memory] = {}
        self._queues: dict[str, Queue] = {}

    def queue(self, name: str) -> Queue:
        return self._queues.setdefault(name, Queue(name))

    def fail(self, message: str) -> None:
        """Kept as well: a step that fails is a step's error, and this must not be mistaken for one."""
        error = OrderError(message)
        self.errors.append(error)
        raise error

    def memory(self, tensor: Tensor, label: str = "a tensor", owner: str = "main") -> Memory:
        storage = tensor.untyped_storage()
        key = storage._cdata
        found = self._memory.get(key)
        if found is None:
            found = self._memory[key] = Memory(label, owner)
            weakref.finalize(storage, self._freed, key)
        return found

    def knows(self, tensor: Tensor) -> Memory | None:
        return self._memory.get(tensor.untyped_storage()._cdata)

    def operation(self, queue: Queue, name: str, reads: list[Memory], writes: list[Memory]) -> int:
        """Queue one. -> its place."""
        known = merged(queue.known, self.host)
        freed, queue.freed = queue.freed, []
        for label, use in freed:
            if known.get(use[0], 0) < use[1]:
                self.fail(f"{name} on {queue.name} may get the memory of {label}, which {use[0]} may still be at")
        for memory in reads:
            self._check(known, queue.name, memory, name, "reads", memory.write)
        for memory in writes:
            self._check(known, queue.name, memory, name, "writes", memory.write)
            for use in memory.reads.items():
                self._check(known, queue.name, memory, name, "writes", use)
        queue.length += 1
        queue.known = known | {queue.name: queue.length}
        for memory in reads:
            memory.reads[queue.name] = queue.length
        for memory in writes:
            memory.write, memory.reads = (queue.name, queue.length), {}
        return queue.length

    def host_uses(self, memory: Memory, what: str) -> None:
        """The host reads or writes it, here and now."""
        for use in (memory.write, *memory.reads.items()):
            if use is not None and self.host.get(use[0], 0) < use[1]:
                self.fail(f"{what}: the host uses {memory.label} while {use[0]} may still be at it")

    def host_waits(self, known: Known) -> None:
        self.host = merged(self.host, known)

    def host_waits_for_all(self) -> None:
        self.host_waits({queue.name: queue.length for queue in self._queues.values()})

    def _check(
        self, known: Known, queue: str, memory: Memory, name: str, does: str, use: tuple[str, int] | None
    ) -> None:
        if use is not None and use[0] != queue and known.get(use[0], 0) < use[1]:
            self.fail(f"{name} on {queue} {does} {memory.label}, which {use[0]} may still be at")

    def _freed(self, key: int) -> None:
        """Called by the collector, which lets nothing be raised."""
        memory = self._memory.pop(key)
        known = merged(self.host, self._queues[memory.owner].known if memory.owner in self._queues else {})
        for use in (memory.write, *memory.reads.items()):
            if use is None or use[0] == memory.owner or known.get(use[0], 0) >= use[1]:
                continue
            if memory.owner in self._queues and memory.owner != "main":  # its next work decides
                self._queues[memory.owner].freed.append((memory.label, use))
            else:
                self.errors.append(OrderError(f"{memory.label} is freed while {use[0]} may still be at it"))


def merged(one: Known, other: Known) -> Known:
    return {name: max(one.get(name, 0), other.get(name, 0)) for name in one.keys() | other.keys()}


def flatten(value: Any) -> list[Tensor]:
    """Tensors in arguments: in sequences, mappings, and objects with slots or attributes such as attention metadata."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in flatten(item)]
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in flatten(item)]
    fields = getattr(value, "__dataclass_fields__", None)
    if fields is not None and not isinstance(value, type):
        return [tensor for name in fields for tensor in flatten(getattr(value, name))]
    return []
