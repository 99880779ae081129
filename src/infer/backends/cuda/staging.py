"""Traffic between host and GPU that neither side waits for: page-locked buffers, a stream for results, events between.

Used on the worker thread; owns its stream, the buffers, and what a copy on its way still reads.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from infer.backends.cuda.device import Device, Event, Stream

ALIGNMENT = 64
"""Bytes; where each array of a transfer begins, for any dtype."""
SMALLEST = 1 << 12
"""Bytes of a buffer; sizes are powers of two, so that steps of similar size share buffers."""


class PinnedPool:
    """Page-locked buffers by size. One that was given back is taken again once the device has passed its event."""

    def __init__(self, device: Device) -> None:
        self._memory = device.memory
        self._resting: dict[int, deque[tuple[Tensor, Event | None]]] = defaultdict(deque)
        self.num_bytes = 0
        """Of all buffers so far."""

    def take(self, num_bytes: int) -> Tensor:
        size = max(SMALLEST, 1 << (num_bytes - 1).bit_length())
        resting = self._resting[size]
        if resting and (resting[0][1] is None or resting[0][1].done()):  # they come back in the order they went
            return resting.popleft()[0]
        self.num_bytes += size
        return self._memory.pinned(size)

    def give_back(self, buffer: Tensor, used_until: Event | None = None) -> None:
        """`used_until`: behind the last work that touches it; None: that work is known to be done."""
        resting = self._resting[len(buffer)]
        if used_until is None:
            resting.appendleft((buffer, None))
        else:
            resting.append((buffer, used_until))


@dataclass(frozen=True, slots=True)
class Place:
    """Where an array lies in a transfer, and what it is."""

    start: int
    num_bytes: int
    dtype: Any
    shape: tuple[int, ...]


def _places(items: Sequence[NDArray[Any]] | Sequence[Tensor]) -> tuple[list[Place], int]:
    """One after the other -> and the bytes of all."""
    places, start = [], 0
    for item in items:
        places.append(Place(start, item.nbytes, item.dtype, tuple(item.shape)))
        start += -(-item.nbytes // ALIGNMENT) * ALIGNMENT
    return places, start


class Staging:
    """`SupportsStaging` of the platform."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pool = PinnedPool(device)
        self._results: Stream = device.new_stream()
        self._on_their_way: deque[tuple[Event, Tensor, Tensor]] = deque()
        """Copies that may still run: (behind it, from, to)."""

    @property
    def pinned_bytes(self) -> int:
        return self._pool.num_bytes

    def upload(self, arrays: Sequence[NDArray[Any]]) -> tuple[Tensor, ...]:
        """All in one copy, queued in front of the work that reads them."""
        arrays = [np.ascontiguousarray(array) for array in arrays]
        places, total = _places(arrays)
        if not total:
            return tuple(
                self._view(self._device.memory.empty(0), place, array)
                for place, array in zip(places, arrays, strict=True)
            )
        buffer, landing = self._pool.take(total), self._device.memory.empty(total)
        host = self._device.memory.on_host(buffer)
        for place, array in zip(places, arrays, strict=True):
            host[place.start : place.start + place.num_bytes] = array.reshape(-1).view(np.uint8)
        self._device.copy(landing, buffer[:total])
        self._pool.give_back(buffer, self._device.main.mark())
        return tuple(self._view(landing, place, array) for place, array in zip(places, arrays, strict=True))

    def fetch(self, tensors: Sequence[Tensor]) -> Fetched:
        """Packed on the main stream, so that what comes next there may overwrite the tensors; copied on the other, so that
        what comes next need not wait for the copy."""
        self._forget_landed()
        places, total = _places(tensors)
        packed, buffer = self._device.memory.empty(total), self._pool.take(max(1, total))
        for place, tensor in zip(places, tensors, strict=True):
            if place.num_bytes:
                piece = packed[place.start : place.start + place.num_bytes]
                piece.copy_(tensor.contiguous().reshape(-1).view(torch.uint8))
        self._results.follow(self._device.main.mark())
        with self._device.using(self._results):
            if total:
                self._device.copy(buffer[:total], packed)
        landed = self._results.mark()
        # The allocator gives `packed` to the main stream's next tensor as soon as nobody holds it.
        self._on_their_way.append((landed, packed, buffer))
        return Fetched(self._device, self._pool, buffer, landed, places)

    def close(self) -> None:
        """Nothing may be on its way any more."""
        self._on_their_way.clear()

    def _forget_landed(self) -> None:
        while self._on_their_way and self._on_their_way[0][0].done():
            self._on_their_way.popleft()

    @staticmethod
    def _view(landing: Tensor, place: Place, array: NDArray[Any]) -> Tensor:
        dtype = torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
        return landing[place.start : place.start + place.num_bytes].view(dtype).view(place.shape)


class Fetched:
    """`plugins.platform.Fetch`: results on their way to the host."""

    def __init__(self, device: Device, pool: PinnedPool, buffer: Tensor, landed: Event, places: list[Place]) -> None:
        self._device = device
        self._pool = pool
        self._buffer: Tensor | None = buffer
        self._landed = landed
        self._places = places
        self._values: tuple[Tensor, ...] = ()

    def ready(self) -> bool:
        return self._buffer is None or self._landed.done()

    def wait(self) -> tuple[Tensor, ...]:
        if self._buffer is not None:
            self._landed.wait()
            buffer, self._buffer = self._buffer, None
            host = self._device.memory.on_host(buffer)
            self._values = tuple(self._own(host, place) for place in self._places)
            self._pool.give_back(buffer)
        return self._values

    @staticmethod
    def _own(host: NDArray[np.uint8], place: Place) -> Tensor:
        """A copy: the buffer is the next step's."""
        if not place.num_bytes:  # an array without elements has strides that no view can be made of
            return torch.empty(place.shape, dtype=place.dtype)
        piece = host[place.start : place.start + place.num_bytes].copy()
        return torch.from_numpy(piece).view(place.dtype).view(place.shape)
