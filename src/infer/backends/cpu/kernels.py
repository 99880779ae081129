"""What the native operations have in common: the library they call and the memory their results lie in.

Used on the worker thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from infer.backends.cpu.library import Library
from infer.backends.reference.scratch import Scratch


class Kernels:
    """Base of the classes whose methods are entries of the table."""

    def __init__(self, library: Library, scratch: Scratch) -> None:
        self._library = library
        self._call: Any = library.call
        self._scratch = scratch
        self._dry = scratch.dry
        """While planning results have a shape and nothing is computed: weights are not there yet."""

    @contextmanager
    def calling(self, call: Any, scratch: Scratch) -> Iterator[None]:
        """Inside, operations call `call` in place of the library and all results lie in `scratch`."""
        before = self._call, self._scratch
        self._call, self._scratch = call, scratch
        try:
            yield
        finally:
            self._call, self._scratch = before

    def _new(self, dtype: torch.dtype, *shape: int) -> Tensor:
        placed = self._scratch.place(shape, dtype)
        return torch.empty(shape, dtype=dtype) if placed is None else placed

    def _dense(self, x: Tensor) -> Tensor:
        """x, or a copy without gaps."""
        if x.is_contiguous():
            return x
        out = self._new(x.dtype, *x.shape)
        if self._dry:
            return out
        if x.dim() < 2 or not x[0].is_contiguous():
            return out.copy_(x)
        size = x.element_size()
        row = x[0].numel() * size
        self._call.infer_copy_rows(x.data_ptr(), out.data_ptr(), len(x), row, x.stride(0) * size)
        return out
