"""The one door to a GPU: its facts, streams, events, pinned memory and graphs, as the platform uses them.

`torch_device` opens it to CUDA; the tests put a device in its place that checks the order of everything. Owns nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from infer.plugins.platform import Graph, Made


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """One GPU."""

    multiprocessors: int
    """How many programs run at a time, at least: a grid should have a few times as many."""
    shared_memory: int
    """Bytes that one program may use."""
    native_fp8: bool
    """Whether it computes with float8_e4m3fn (NVIDIA from 8.9); without, kernels read its bits."""
    asynchronous_products: bool = False
    """Whether matrix units read shared memory by themselves (NVIDIA from 9.0): larger tiles pay then."""


class Event(Protocol):
    """A place in a stream's queue."""

    def done(self) -> bool:
        """Whether the device has passed it. Never waits."""
        ...

    def wait(self) -> None:
        """The calling thread waits until the device has passed it. Raises what the device reports."""
        ...


class Stream(Protocol):
    """A queue of work that the device does in order; it knows nothing of the order of other queues."""

    def mark(self) -> Event:
        """An event behind all that is queued now."""
        ...

    def follow(self, event: Event) -> None:
        """What is queued from now on comes after the event. The calling thread does not wait."""
        ...


class CaptureError(Exception):
    """The work does something that a graph cannot hold."""


class DeviceMemory(Protocol):
    """Memory of a GPU, and what the GPU may reach of the host's. `free` from any thread."""

    def pinned(self, num_bytes: int) -> Tensor:
        """Page-locked host memory [num_bytes] uint8, which the device reads and writes by itself. Slow to get: keep it."""
        ...

    def on_host(self, pinned: Tensor) -> NDArray[np.uint8]:
        """The same memory for one use by the calling thread, which is here and now."""
        ...

    def empty(self, num_bytes: int) -> Tensor:
        """Device memory [num_bytes] uint8. It goes back when the tensor ends, for use by the stream that is current now:
        whoever lets another stream use it must keep it until that one is done."""
        ...

    def free(self) -> tuple[int, int]:
        """-> (total, free) bytes of the device, as of now."""
        ...

    def in_use(self) -> int:
        """Bytes that this process has taken from the device for tensors, freed ones that are kept included."""
        ...

    def return_free(self) -> None:
        """What is kept for later tensors goes back to the device."""
        ...


class Device(Protocol):
    """A GPU. Used from the worker thread; `synchronize` from any."""

    name: str
    torch_device: torch.device
    facts: DeviceFacts
    memory: DeviceMemory
    main: Stream
    """Where everything is queued that is not queued elsewhere on purpose: torch's own default."""

    def new_stream(self) -> Stream: ...

    def current_stream(self) -> Stream:
        """Where operations are queued now: `main`, what `using` names, or what a capture notes."""
        ...

    def using(self, stream: Stream) -> AbstractContextManager[Any]:
        """Operations of torch, kernels and `copy` are queued there meanwhile."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy between pinned and device memory on the current stream."""
        ...

    def capture(self, work: Callable[[], Made]) -> Graph[Made]:
        """Note the device's operations of `work` without doing them. Raises `CaptureError` where one cannot be noted.
        Results of all graphs lie in the same memory: a replay may overwrite those of another."""
        ...

    def synchronize(self) -> None:
        """The calling thread waits for all queues."""
        ...
