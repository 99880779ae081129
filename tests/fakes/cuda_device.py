"""A GPU that is not there: computes on CPU tensors, and checks that streams, events, pinned memory and graphs are used in an
order that a real one would need. For tests; one per platform, used from its worker thread. Owns the record of all of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fakes.order import Known, Order, Queue
from fakes.watch import Entry, Tape, Watch, once, spoil
from infer.backends.cuda.device import CaptureError, DeviceFacts
from infer.plugins.platform import Made

GARBAGE = 0xA5


@dataclass(slots=True)
class Later:
    """A copy that the device does in its own time."""

    queue: str
    place: int
    run: Callable[[], None]


class FakeEvent:
    def __init__(self, device: FakeDevice, queue: Queue) -> None:
        self._device, self._queue = device, queue.name
        self.place = queue.length
        self.known: Known = dict(queue.known)

    def done(self) -> bool:
        order = self._device.order
        if order.host.get(self._queue, 0) < self.place and self._device.is_late():
            return False
        self.wait()
        return True

    def wait(self) -> None:
        self._device.order.host_waits(self.known | {self._queue: self.place})
        self._device.settle()


class FakeStream:
    def __init__(self, device: FakeDevice, queue: Queue) -> None:
        self.device, self.queue = device, queue

    def mark(self) -> FakeEvent:
        return FakeEvent(self.device, self.queue)

    def follow(self, event: Any) -> None:
        known = event.known | {event._queue: event.place}
        self.queue.known = {
            name: max(known.get(name, 0), self.queue.known.get(name, 0))
            for name in known.keys() | self.queue.known.keys()
        }


class FakeMemory:
    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.num_pinned = 0
        """Buffers so far."""

    def pinned(self, num_bytes: int) -> Tensor:
        self._device.refuse_in_capture("page-locked memory is allocated")
        self.num_pinned += 1
        buffer = _garbage(num_bytes)
        self._device.order.memory(buffer, f"pinned buffer {self.num_pinned}", owner="")
        return buffer

    def on_host(self, pinned: Tensor) -> NDArray[np.uint8]:
        self._device.order.host_uses(self._device.order.memory(pinned, owner=""), "on_host")
        with torch._C.DisableTorchFunction():
            return pinned.numpy()

    def empty(self, num_bytes: int) -> Tensor:
        self._device.refuse_in_capture("device memory is allocated outside the graph's own")
        buffer = _garbage(num_bytes)
        self._device.order.memory(buffer, "a transfer's device memory", owner=self._device.current.name)
        return buffer

    def free(self) -> tuple[int, int]:
        return 8 << 30, 4 << 30

    def in_use(self) -> int:
        return 1 << 20

    def return_free(self) -> None: ...


class FakeGraph(Generic[Made]):
    def __init__(self, device: FakeDevice, tape: Tape, made: Made) -> None:
        self._device, self._tape, self._made = device, tape, made

    def replay(self) -> Made:
        device = self._device
        device.num_replays += 1
        for other in device.graphs:
            if other is not self:
                other.overwrite("another graph's replay")
        self._tape.replay(device.order, device.current)
        return self._made

    def overwrite(self, name: str) -> None:
        """Results of all graphs lie in the same memory."""
        made = self._tape.results
        self._device.order.operation(self._device.current, name, [], [self._device.order.memory(one) for one in made])
        for one in made:
            spoil(one)


class FakeDevice:
    """`is_late()` says of an event that nobody has waited for whether the device still has to come to it."""

    def __init__(self, is_late: Callable[[], bool] = lambda: False) -> None:
        self.name = "fake sm_00"
        self.torch_device = torch.device("cpu")
        self.facts = DeviceFacts(multiprocessors=2, shared_memory=1 << 17, native_fp8=False)
        self.order = Order()
        self.is_late = is_late
        self.memory = FakeMemory(self)
        self.current = self.order.queue("main")
        self.main: Any = FakeStream(self, self.current)
        self.tape: Tape | None = None
        """Of the graph that is being captured."""
        self.graphs: list[FakeGraph[Any]] = []
        self.num_replays = 0
        self.num_streams = 0
        self.waits: list[str] = []
        """Operations of torch that made the host wait for a stream."""
        self._later: list[Later] = []
        self._watch: Watch | None = None

    def new_stream(self) -> FakeStream:
        self.num_streams += 1
        return FakeStream(self, self.order.queue(f"stream {self.num_streams}"))

    def current_stream(self) -> FakeStream:
        return FakeStream(self, self.current)

    @contextmanager
    def using(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream.queue
        try:
            if self._watch is None:
                self._watch = Watch(self)
                try:
                    with self._watch:
                        yield
                finally:
                    self._watch = None
            else:
                yield
        finally:
            self.current = before

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Into pinned memory in the device's own time: until then there is garbage."""
        self.refuse_in_capture("a copy to or from page-locked memory is queued")
        reads, writes = self.order.memory(source), self.order.memory(target)
        place = self.order.operation(self.current, "copy", [reads], [writes])
        with torch._C.DisableTorchFunction():
            if writes.owner:
                target.copy_(source)
                return
            target.fill_(GARBAGE)
            self._later.append(Later(self.current.name, place, _copy_later(self.order, target, source)))

    @property
    def watching(self) -> bool:
        """Whether operations are the device's just now."""
        return self._watch is not None

    def launched(self, entry: Entry, given: list[Tensor], written: list[Tensor]) -> None:
        """A kernel was started."""
        if self.tape is not None:
            self.tape.add(entry)
            return
        memory = self.order.memory
        reads = once([memory(one) for one in given])
        writes = once([memory(one, owner=self.current.name) for one in (*entry.made, *written)])
        self.order.operation(self.current, entry.name, reads, writes)

    def capture(self, work: Callable[[], Made]) -> FakeGraph[Made]:
        self.tape = Tape()
        try:
            made = work()
        finally:
            tape, self.tape = self.tape, None
        for graph in self.graphs:
            graph.overwrite("another graph's capture")
        tape.close(made, self.order)
        graph = FakeGraph(self, tape, made)
        self.graphs.append(graph)
        return graph

    def synchronize(self) -> None:
        self.order.host_waits_for_all()
        self.settle()

    def settle(self) -> None:
        """Do what the host now knows to be done."""
        due = [one for one in self._later if self.order.host.get(one.queue, 0) >= one.place]
        self._later = [one for one in self._later if one not in due]
        for one in due:
            one.run()

    def host_waits_for_current(self, name: str) -> None:
        """What torch does where Python wants a number."""
        if self.tape is not None:
            raise CaptureError(f"{name}: operation not permitted when stream is capturing")
        self.waits.append(name)
        self.order.host_waits(self.current.known | {self.current.name: self.current.length})
        self.settle()

    def refuse_in_capture(self, what: str) -> None:
        if self.tape is not None:
            self.order.fail(f"{what} while a graph is captured")

    def check(self) -> None:
        """Raises what was found."""
        for error in self.order.errors:
            raise error


def _garbage(num_bytes: int) -> Tensor:
    with torch._C.DisableTorchFunction():
        return torch.full((num_bytes,), GARBAGE, dtype=torch.uint8)


def _copy_later(order: Order, target: Tensor, source: Tensor) -> Callable[[], None]:
    """Holds neither: whoever frees one too early shall be found."""
    storages = [weakref.ref(tensor.untyped_storage()) for tensor in (target, source)]
    places = [(tensor.storage_offset(), tensor.shape, tensor.stride()) for tensor in (target, source)]

    def run() -> None:
        found = [storage() for storage in storages]
        if found[0] is None or found[1] is None:
            order.fail("a copy's memory was freed before the copy was done")
        with torch._C.DisableTorchFunction(), torch.inference_mode():
            tensors = [
                torch.empty(0, dtype=torch.uint8).set_(storage, *place)  # type: ignore[call-overload]
                for storage, place in zip(found, places, strict=True)
            ]
            tensors[0].copy_(tensors[1])

    return run
