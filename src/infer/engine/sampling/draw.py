"""Draw a token from each row by its own uniform number. Runs in the worker thread; owns nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from infer.engine.sampling.philox import uniforms
from infer.engine.sampling.row import SamplingRow

BLOCK = 128
"""Tokens per partial sum: the search goes to a block first, then to a token within it."""

FusedDraw = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""`plugins.platform.Ops.draw`."""
Uniforms = Callable[[Tensor, Tensor], Tensor]
"""`plugins.platform.Ops.uniforms`."""


def seeds_of(rows: Sequence[SamplingRow]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Seed and output position of each row: what its number is made of."""
    return (
        np.array([row.spec.seed for row in rows], dtype=np.uint64),
        np.array([row.output_position for row in rows], dtype=np.uint64),
    )


def numbers_of(rows: Sequence[SamplingRow]) -> NDArray[np.float64]:
    """The number that decides each row's draw."""
    return uniforms(*seeds_of(rows))


def draw_fused(
    fused: FusedDraw,
    logits: Tensor,
    index: Sequence[int],
    rows: Sequence[SamplingRow],
    on_device: Uniforms | None = None,
) -> Tensor:
    """(raw float32 [M, V], rows of it, their state, the platform's own random numbers if it has them) -> ids [D] int64:
    temperature, truncation and draw in one."""
    specs, device = [row.spec for row in rows], logits.device

    def column(values: list[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    if on_device is None:
        numbers = torch.from_numpy(numbers_of(rows)).to(device)
    else:
        seeds, positions = (torch.from_numpy(given.view(np.int64)).to(device) for given in seeds_of(rows))
        numbers = on_device(seeds, positions)
    return fused(
        logits,
        column(list(index), torch.int64),
        column([spec.temperature for spec in specs], torch.float32),
        column([spec.top_k for spec in specs], torch.int64),
        column([spec.top_p for spec in specs], torch.float64),
        column([spec.min_p for spec in specs], torch.float32),
        numbers,
    )


def draw(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """(processed float32 [M, V], a row each) -> ids [M] int64, by inverting the cumulative probability in id order.

    Every operation works within a row, and the number is keyed by (seed, output position): what a row draws depends
    on nothing else. Sums are double.
    """
    return invert(torch.softmax(logits, dim=-1), torch.from_numpy(numbers_of(rows)).to(logits.device))


def invert(weights: Tensor, numbers: Tensor) -> Tensor:
    """(weights [M, V] >= 0 with a positive sum, numbers [M] double in [0, 1)) -> first id whose cumulative weight
    exceeds number * total; never an id of weight 0."""
    rows, width = weights.shape
    padded = torch.nn.functional.pad(weights, (0, -width % BLOCK)).view(rows, -1, BLOCK)
    block_sums = padded.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    targets = numbers[:, None] * block_sums[:, -1:]
    block = _first_above(block_sums, targets)
    before = torch.where(block > 0, block_sums.gather(-1, (block - 1).clamp(min=0)), 0.0)
    inside = padded.gather(1, block[:, :, None].expand(-1, -1, BLOCK))[:, 0].cumsum(dim=-1, dtype=torch.float64)
    return (block * BLOCK + _first_above(inside, targets - before))[:, 0]


def _first_above(sums: Tensor, targets: Tensor) -> Tensor:
    """First index whose sum exceeds the target; where rounding lets none, the last that adds anything."""
    last = torch.searchsorted(sums, sums[:, -1:].contiguous())
    return torch.minimum(torch.searchsorted(sums, targets.contiguous(), right=True), last)
