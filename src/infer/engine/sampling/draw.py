"""Draw a token from each row by its own uniform number. Runs in the worker thread; owns nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from infer.engine.sampling.philox import uniforms
from infer.engine.sampling.row import Feature, SamplingRow

BLOCK = 128
"""Tokens per partial sum: the search goes to a block first, then to a token within it."""

FusedDraw = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""`plugins.platform.Ops.draw`."""
Uniforms = Callable[[Tensor, Tensor], Tensor]
"""`plugins.platform.Ops.uniforms`."""
MaskedDraw = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""`plugins.platform.Ops.draw_allowed`."""


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
    return fused(logits, *_columns(logits.device, index, rows, on_device))


def draw_masked(
    fused: MaskedDraw,
    logits: Tensor,
    index: Sequence[int],
    rows: Sequence[SamplingRow],
    on_device: Uniforms | None = None,
) -> Tensor:
    """As `draw_fused` for rows with a guide: among what their masks allow, the best of it for greedy rows; -1 for none."""
    every = b"\xff" * (-(-logits.shape[-1] // 32) * 4)
    joined = bytearray().join(every if row.guide is None else row.guide.mask or every for row in rows)
    masks = torch.from_numpy(np.frombuffer(joined, dtype=np.uint8).reshape(len(rows), -1))
    return fused(logits, *_columns(logits.device, index, rows, on_device), masks.to(logits.device))


def _columns(
    device: torch.device, index: Sequence[int], rows: Sequence[SamplingRow], on_device: Uniforms | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What a fused draw takes behind the logits."""

    def column(values: NDArray[Any]) -> Tensor:
        made = torch.from_numpy(values)
        return made if device.type == "cpu" else made.to(device)

    if not any(row.features & Feature.RANDOM for row in rows):
        numbers = column(np.zeros(len(rows)))
    elif on_device is None:
        numbers = column(numbers_of(rows))
    else:
        seeds, positions = (column(given.view(np.int64)) for given in seeds_of(rows))
        numbers = on_device(seeds, positions)
    places, heat, top_k, top_p, min_p = (column(values) for values in settings(index, rows))
    return places, heat, top_k, top_p, min_p, numbers


def settings(index: Sequence[int], rows: Sequence[SamplingRow]) -> list[NDArray[Any]]:
    """Arguments of a fused draw between logits and numbers: which rows, temperature (0 for greedy ones), top-k, top-p, min-p.
    By NumPy, for in each operation of torch another thread may take over."""
    specs = [row.spec for row in rows]
    return [
        np.array(index, dtype=np.int64),
        np.array([row.spec.temperature if row.features & Feature.RANDOM else 0.0 for row in rows], dtype=np.float32),
        np.array([spec.top_k for spec in specs], dtype=np.int64),
        np.array([spec.top_p for spec in specs], dtype=np.float64),
        np.array([spec.min_p for spec in specs], dtype=np.float32),
    ]


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
