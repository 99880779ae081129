"""Quants in groups into blocks of GGML that hold the same numbers, or into plain numbers.

Worker thread, while loading; pure.
"""

from __future__ import annotations

import torch
from torch import Tensor

from infer.errors import WeightError
from infer.plugins.checkpoint_format import GroupedRows, StoredWeight

BLOCK = 32
LARGEST_HALF = 65504.0
MIDDLE = {16: 8, 256: 128}
"""The quant that stands for 0 in blocks without a minimum, by the number of levels."""


def block_type(weight: StoredWeight) -> str | None:
    """Q4_0 and Q8_0 where 0 is the middle quant: the same numbers, for scales that fp16 holds. Q4_1 where each group of 4 bits
    has its own zero: its minimum, the zero times the scale, is rounded to fp16. None: nothing fits."""
    if not weight.group_size or weight.group_size % BLOCK or weight.shape[1] % BLOCK:
        return None
    if weight.zero is not None and weight.zero == MIDDLE.get(weight.levels):
        return "Q4_0" if weight.levels == 16 else "Q8_0"
    return "Q4_1" if weight.levels == 16 else None


def blocks_of(rows: GroupedRows, weight: StoredWeight, name: str) -> Tensor:
    """-> uint8 [n, bytes of a row], of `block_type(weight)`. Raises `WeightError` for what such blocks cannot hold."""
    kind, (count, columns) = block_type(weight), rows.quants.shape
    if rows.groups is not None:
        raise WeightError(
            f"tensor {name!r}: its columns are in another order, which the section does not say", tensor=name
        )
    per = columns // BLOCK
    quants = rows.quants.view(count, per, BLOCK)
    scales, zeros = (_per_block(part, weight.group_size, per) for part in (rows.scales, rows.zeros))
    if weight.zero is not None and not bool((zeros == weight.zero).all()):
        raise WeightError(
            f"tensor {name!r}: zero points that are not {weight.zero}, and its section says symmetric", tensor=name
        )
    made = [_half(scales, name)]
    if kind == "Q4_1":
        made.append(_half(-scales * zeros, name))
    if kind == "Q8_0":
        made.append(quants ^ 0x80)
    else:
        made.append(quants[..., : BLOCK // 2] | quants[..., BLOCK // 2 :] << 4)
    return torch.cat(made, dim=-1).view(count, -1)


def numbers_of(rows: GroupedRows, weight: StoredWeight) -> Tensor:
    """-> fp32 [n, I]."""
    columns = rows.quants.shape[1]
    groups = rows.groups
    if groups is None:
        groups = torch.arange(columns) // (weight.group_size or columns)
    return (rows.quants.float() - rows.zeros[:, groups]) * rows.scales[:, groups]


def _per_block(part: Tensor, group_size: int, per: int) -> Tensor:
    """[n, G] -> [n, blocks, 1]."""
    return part.repeat_interleave(max(1, group_size // BLOCK), dim=1)[:, :per].unsqueeze(-1)


def _half(x: Tensor, name: str) -> Tensor:
    """fp32 [n, blocks, 1] -> as fp16, uint8 [n, blocks, 2]."""
    if not bool((x.abs() <= LARGEST_HALF).all()):
        raise WeightError(
            f"tensor {name!r}: a scale of {x.abs().max().item():.3g} does not fit the fp16 scale of a block; set "
            "model.expand_quantized=true",
            tensor=name,
        )
    return x.half().view(torch.uint8)
