"""int8 and int4 weights made from plain ones while they are loaded: blocks of 32 as GGML stores them, rounded with care.

Called on the worker thread, one piece of a tensor at a time; pure, owns nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infer.errors import WeightError
from infer.plugins.hookspecs import hookimpl
from infer.plugins.quant_method import API_VERSION, QuantMethodSpec, WeightRole

BLOCK = 32
LEVELS = (15.0, 16.2, 17.4)
"""Steps that the range of a block is divided into at first. 4 bits have 15; a little more of them makes the smaller steps pay
for the two ends that are cut. Three tries come within 2 % of the error of twenty."""
ROUNDING = {"Q8_0": "nearest to 127 steps", "Q4_1": "best fit of 3"}
"""What a platform's own encoder must do to make the same bytes."""
LARGEST_HALF = 65504.0


class WeightOnlyMethod:
    """Every role has one block type. int8 is Q8_0: 32 signed bytes and one scale. int4 is Q4_1: 32 steps of four bits above
    a minimum, with a scale; the embedding and the head, whose errors nothing averages, have 8 bits then too."""

    def __init__(self, name: str, types: dict[WeightRole, str]) -> None:
        self.name = name
        self._types = types

    def block_type(self, role: WeightRole) -> str | None:
        return self._types.get(role)

    def rounding(self, block_type: str) -> str:
        return ROUNDING[block_type]

    def encode(self, rows: Tensor, block_type: str) -> Tensor:
        count, columns = rows.shape
        # Lanes are blocks: every sum below runs over the first dimension, in one order whatever the number of blocks.
        blocks = rows.float().reshape(-1, BLOCK).t().contiguous()
        if not bool(blocks.isfinite().all()):
            raise WeightError(f"a weight that is to be quantised to {self.name} holds numbers that are not finite")
        made = _q8_0(blocks) if block_type == "Q8_0" else _q4_1(blocks)
        return made.view(count, columns // BLOCK * made.shape[1])


def _q8_0(x: Tensor) -> Tensor:
    """[32, n] -> [n, 34]: an fp16 scale, 32 signed bytes."""
    scale = _half(x.abs().amax(0) / 127)
    quants = (x * _inverse(scale)).round_().clamp_(-127, 127)
    return torch.cat((_bytes(scale), quants.to(torch.int8).t().contiguous().view(torch.uint8)), dim=1)


def _q4_1(x: Tensor) -> Tensor:
    """[32, n] -> [n, 20]: fp16 scale and minimum, then nibbles, element i beside element 16 + i.

    For each way to divide the range the quants are fixed and scale and minimum follow by least squares; the best stays.
    """
    low, high, total = x.amin(0), x.amax(0), _sum(x)
    _refuse_beyond(torch.maximum(low.abs(), high.abs()), (15 + 1) * LARGEST_HALF)
    best = torch.full_like(low, torch.inf)
    scale, minimum = torch.zeros_like(low), low.clone()
    for levels in LEVELS:
        inverse = _inverse((high - low) / levels)
        quants = (x * inverse).add_(7.5 - (high + low) / 2 * inverse).round_().clamp_(0, 15)
        ones, squares, products = _sum(quants), _sum(quants * quants), _sum(x * quants)
        spread = BLOCK * squares - ones * ones
        step = torch.where(spread > 0, (BLOCK * products - ones * total) / spread, 0.0)
        offset = (total - step * ones) / BLOCK
        error = -(offset * total + step * products)  # what the fit leaves, less the sum of squares
        better = error < best
        best, scale = torch.where(better, error, best), torch.where(better, step, scale)
        minimum = torch.where(better, offset, minimum)
    scale, minimum = _half(scale), _half(minimum + 0.0)  # a zero without a sign
    quants = ((x - minimum) * _inverse(scale)).round_().clamp_(0, 15).to(torch.uint8)
    nibbles = quants[: BLOCK // 2] | quants[BLOCK // 2 :] << 4
    return torch.cat((_bytes(scale), _bytes(minimum), nibbles.t()), dim=1)


def _sum(x: Tensor) -> Tensor:
    """[32, n] -> [n], added in halves."""
    while len(x) > 1:
        half = len(x) // 2
        x = x[:half] + x[half:]
    return x[0]


def _half(x: Tensor) -> Tensor:
    """Rounded to what fp16 can hold."""
    _refuse_beyond(x.abs(), LARGEST_HALF)
    return x.half().float()


def _refuse_beyond(sizes: Tensor, limit: float) -> None:
    if bool((sizes > limit).any()):
        raise WeightError(
            f"a weight as large as {sizes.max().item():.3g} per step does not fit the fp16 scale of a block"
        )


def _inverse(x: Tensor) -> Tensor:
    """1 / x, and 0 for 0."""
    return torch.where(x != 0, 1 / x, 0.0)


def _bytes(x: Tensor) -> Tensor:
    """[n] -> [n, 2]: as fp16."""
    return x.half().view(-1, 1).view(torch.uint8)


def create_int8(section: dict[str, Any] | None) -> WeightOnlyMethod:
    return WeightOnlyMethod("int8", {"linear": "Q8_0", "experts": "Q8_0", "vocabulary": "Q8_0"})


def create_int4(section: dict[str, Any] | None) -> WeightOnlyMethod:
    return WeightOnlyMethod("int4", {"linear": "Q4_1", "experts": "Q4_1", "vocabulary": "Q8_0"})


def matches(section: dict[str, Any] | None) -> bool:
    """Never: no checkpoint is stored so."""
    return False


@hookimpl
def infer_quant_methods() -> list[QuantMethodSpec]:
    return [
        QuantMethodSpec(
            name=name,
            api=API_VERSION,
            factory=f"{__name__}:create_{name}",
            matches=f"{__name__}:matches",
            dtypes=("float32", "bfloat16", "float16"),
            example={"section": None, "shape": [48, 64], "tolerance": tolerance},
            at_load=True,
        )
        for name, tolerance in (("int8", 0.006), ("int4", 0.08))
    ]
