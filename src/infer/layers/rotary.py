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
    """How positions become angles."""

    theta: float
    kind: Literal["default", "linear", "dynamic", "llama3", "yarn"] = "default"
    """"dynamic" changes nothing within the trained length, and no engine runs a model beyond it."""
    partial: float = 1.0
    """Share of the head size that is rotated."""
    factor: float = 1.0
    """How many times longer than the trained length contexts become."""
    original_max_position: int = 8192
    """The trained length ("llama3" and "yarn")."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    """Both of "llama3": the band of wavelengths between kept and scaled."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    """Both of "yarn": dimensions that turn more often than the first over the trained length are kept, those that turn
    less often than the second are scaled."""
    truncate: bool = True
    """"yarn": whether that range is widened to whole dimensions."""
    attention_factor: float = 1.0
    """Multiplies cos and sin."""
    mscale_all_dim: float = 0.0
    """DeepSeek's share of the attention scale, see `yarn_mscale`; 0: none."""

    @property
    def scale_multiplier(self) -> float:
        """What DeepSeek's attention multiplies its scale by."""
        if self.kind == "default" or not self.mscale_all_dim:
            return 1.0
        return yarn_mscale(self.factor, self.mscale_all_dim) ** 2


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """How much sharper attention is to be over a context that is `factor` times longer (arXiv:2309.00071, eq. 22)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def inverse_frequencies(rope: RopeFacts, head_size: int) -> Tensor:
    """-> fp32 [R], R = half of the rotated dimensions.

    Sources: arXiv:2104.09864; "yarn": arXiv:2309.00071; "llama3": the Llama 3.1 release.
    """
    rotated = int(head_size * rope.partial)
    exponents = torch.arange(0, rotated, 2, dtype=torch.int64, device="cpu").float() / rotated
    periods = rope.theta**exponents
    plain = 1.0 / periods
    match rope.kind:
        case "default" | "dynamic":
            return plain
        case "linear":
            return plain / rope.factor
        case "yarn":
            kept = 1 - _yarn_ramp(rope, rotated)
            # In this order the result is transformers' to the last bit, and so are angles far out.
            return 1.0 / (rope.factor * periods) * (1 - kept) + plain * kept
        case "llama3":
            return _llama3(rope, plain)


def _yarn_ramp(rope: RopeFacts, rotated: int) -> Tensor:
    """[R] from 0 (kept) to 1 (scaled)."""

    def dimension(turns: float) -> float:
        """The dimension, of `rotated`, that turns this often over the trained length."""
        return rotated * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    if low == high:
        high += 0.001
    steps = torch.arange(rotated // 2, dtype=torch.float32, device="cpu")
    return ((steps - low) / (high - low)).clamp(0, 1)


def _llama3(rope: RopeFacts, plain: Tensor) -> Tensor:
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
        self.angles = context.ops.rotary_angles
        self.attention_factor = rope.attention_factor
        self.frequencies = inverse_frequencies(rope, head_size).to(context.device)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [T] int64 -> cos, sin, each fp32 [T, R]."""
        if self.angles is not None:
            return self.angles(positions, self.frequencies, self.attention_factor)
        angles = positions.unsqueeze(1).float() * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        if self.attention_factor != 1.0:
            cos, sin = cos * self.attention_factor, sin * self.attention_factor
        return cos, sin
