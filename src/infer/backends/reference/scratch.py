"""One buffer for the large tensors of a step: each lies where earlier ones have ended, so that a step takes what was planned.

Used on the worker thread; owns the buffer. Tensors may end on any thread. See docs/decisions/004-workspace.md.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LARGE = 1 << 17
"""Bytes from which a tensor is placed in the buffer; placing takes microseconds, computing this much takes more."""
TILE = 1 << 16
"""Bytes of a large result that are computed at a time where torch has no variant that writes into a given tensor."""
ALIGNMENT = 64


class Scratch:
    """Space for large tensors. A place is free again when the last tensor over it is gone, views included.

    Without a reservation every tensor comes from torch. While planning (`dry`) places are given out without end, only
    to count them: the tensors have a shape and memory that nobody touches, and ops compute nothing.
    """

    def __init__(self, *, dry: bool = False, large: int = LARGE) -> None:
        """large: bytes from which a tensor is placed in the buffer."""
        self.dry = dry
        self._large = large
        self.high_water = 0
        """Most bytes of the buffer in use at a time so far, gaps included."""
        self._buffer: NDArray[np.uint8] | None = None
        self._live: dict[int, tuple[int, weakref.ref[Any]]] = {}

    @property
    def reserved(self) -> bool:
        """Whether there is a buffer."""
        return self._buffer is not None

    def reserve(self, num_bytes: int) -> None:
        """Take address space; its pages cost memory from the first use on."""
        self._buffer = None if num_bytes <= 0 else np.frombuffer(_pages(num_bytes), dtype=np.uint8)

    def trim(self) -> None:
        """Give the pages back; the buffer stays, in another place."""
        if self._buffer is not None:
            self.reserve(len(self._buffer))

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the buffer."""
        buffer = self._buffer
        return buffer is not None and 0 <= tensor.data_ptr() - buffer.ctypes.data <= len(buffer)

    def release(self) -> None:
        """Give the buffer back once the last tensor over it is gone."""
        self._buffer = None

    def place(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """An uninitialised tensor in the buffer; None where torch shall allocate: it is small, or nothing is reserved.
        Where the buffer is full the tensor comes from torch's allocator."""
        size = math.prod(shape) * dtype.itemsize
        if self.dry:
            return self._dry(shape, dtype, size)
        if size < self._large or self._buffer is None:
            return None
        start = self._gap(size)
        if start + size > len(self._buffer):
            return torch.empty(shape, dtype=dtype)
        piece = self._buffer[start : start + size]
        self._take(start, size, piece)
        return torch.from_numpy(piece).view(dtype).view(*shape)

    def new(self, like: Tensor, shape: Sequence[int]) -> Tensor:
        """An uninitialised tensor with the dtype and device of `like`, in the buffer if it is large."""
        placed = self.place(shape, like.dtype)
        return like.new_empty(shape) if placed is None else placed

    def tiles(self, out: Tensor) -> Iterator[slice]:
        """Ranges of rows of a large result, small enough that what computes them stays small; none while planning."""
        if self.dry or not len(out):
            return
        step = max(1, TILE * len(out) // max(1, out.numel() * out.itemsize))
        for start in range(0, len(out), step):
            yield slice(start, start + step)

    def _dry(self, shape: Sequence[int], dtype: torch.dtype, size: int) -> Tensor:
        if size < self._large:
            return torch.empty(shape, dtype=dtype)
        with torch._C.DisableTorchFunction():  # what watches torch's allocations shall not count this one
            piece = np.empty(size, dtype=np.uint8)
            self._take(self._gap(size), size, piece)
            return torch.from_numpy(piece).view(dtype).view(*shape)

    def _gap(self, size: int) -> int:
        """The lowest place where `size` bytes are free."""
        start = 0
        for begin, (stop, _) in sorted(self._live.copy().items()):  # a copy: tensors may end on other threads
            if begin - start >= size:
                break
            start = stop
        return start

    def _take(self, start: int, size: int, piece: NDArray[np.uint8]) -> None:
        live, stop = self._live, start + -(-size // ALIGNMENT) * ALIGNMENT

        def end(_: object) -> None:
            live.pop(start, None)

        live[start] = (stop, weakref.ref(piece, end))  # the tensor's storage is what keeps the array alive
        self.high_water = max(self.high_water, stop)


def _pages(num_bytes: int) -> mmap.mmap:
    """Pages of this process alone: a forked child must not write into a step's tensors. Large ones, where they exist."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, num_bytes)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        with suppress(OSError):  # a kernel without them
            pages.madvise(advice)
    return pages
