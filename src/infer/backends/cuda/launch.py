"""How a kernel is started: the one door between the wrappers of this package and Triton.

Called on the worker thread; owns nothing. The compile gate of the tests puts a recorder in this place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

Grid = tuple[int, ...]


class Launch(Protocol):
    """Start `kernel` on a grid. Tensors and numbers are arguments by position, what the kernel is compiled for has a name."""

    def __call__(
        self, kernel: Any, grid: Grid, *args: Any, num_warps: int = 4, num_stages: int = 2, **constants: Any
    ) -> None: ...


def launch(kernel: Any, grid: Grid, *args: Any, num_warps: int = 4, num_stages: int = 2, **constants: Any) -> None:
    """Nothing is started on an empty grid, which CUDA refuses."""
    if all(grid):
        kernel[grid](*args, num_warps=num_warps, num_stages=num_stages, **constants)


@dataclass(frozen=True, slots=True)
class ProductTile:
    """Rows, columns, depth of one dense product."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


def power_of_two(count: int, least: int = 1) -> int:
    """The smallest power of two that is at least both: the sizes of a kernel's tiles."""
    return max(least, 1 << max(0, count - 1).bit_length())


def ceil_div(count: int, size: int) -> int:
    return -(-count // size)


def dense_rows(x: Tensor) -> Tensor:
    """x, or a copy where its last dimension is not dense: kernels take strides of all others."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def stored(x: Tensor) -> Tensor:
    """8-bit floats as bytes: not every GPU has the type, and the kernels know its bits."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
