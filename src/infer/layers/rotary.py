"""Rotary position embedding: inverse frequencies once, cos and sin once a step.

Called on the worker thread; owns the inverse frequencies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from infer.layers.parameter import Layer

if TYPE_CHECKING:
    from infer.plugins.model import BuildContext


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeFacts:
    """How positions become angles; the fields after `factor` belong to "llama3" alone."""

    theta: float
    kind: Literal["default", "linear", "llama3"] = "default"
    partial: float = 1.0
    """Share of the head size that is rotated."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


def inverse_frequencies(rope: RopeFacts, head_size: int) -> Tensor:
    """-> fp32 [R], R = half of the rotated dimensions (arXiv:2104.09864; "llama3": the Llama 3.1 release)."""
    rotated = int(head_size * rope.partial)
    exponents = torch.arange(0, rotated, 2, dtype=torch.int64, device="cpu").float() / rotated
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    wavelength = 2 * math.pi / plain
    longest_kept = rope.original_max_position / rope.high_freq_factor
    shortest_scaled = rope.original_max_position / rope.low_freq_factor
    blend = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - blend) * plain / rope.factor + blend * plain
    scaled = torch.where(wavelength > shortest_scaled, plain / rope.factor, between)
    return torch.where(wavelength < longest_kept, plain, scaled)


class Rotary(Layer):
    """Angles of one set of frequencies, in fp32 whatever the compute dtype."""

    def __init__(self, context: BuildContext, rope: RopeFacts, head_size: int) -> None:
        self.frequencies = inverse_frequencies(rope, head_size).to(context.device)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [T] int64 -> cos, sin, each fp32 [T, R]."""
        angles = positions.unsqueeze(1).float() * self.frequencies
        return angles.cos(), angles.sin()
