"""Which weights of a GGUF stay in the blocks they are stored in, because the platform multiplies with them directly.

Worker thread, between building a model and loading it; owns nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from infer.layers.parameter import Layer, Parameter, named_parameters
from infer.plugins.model import CausalLM
from infer.plugins.platform import BlockOps

MATRIX = 2
"""Dimensions of a weight that may stay."""


def keep_stored_blocks(model: CausalLM, stored: Mapping[str, str], blocks: BlockOps) -> None:
    """Turn parameters into slots for raw blocks where all tensors that fill one are of types the platform knows.

    `stored` is tensor name -> block type. The others are dequantised while they are read.
    """
    sources: dict[str, list[tuple[tuple[int, int] | None, str]]] = {}
    for name, target in model.weight_table().targets.items():
        kind = "" if target.transposed else stored.get(name, "")  # blocks run along the stored rows
        sources.setdefault(target.path, []).append((target.rows, kind))
    for path, parameter in named_parameters(cast(Layer, model)).items():
        kinds = dict.fromkeys(kind for _, kind in sources.get(path, []))
        if len(kinds) == 1 and can_stay(parameter, next(iter(kinds)), blocks):
            kind = next(iter(kinds))
            parameter.keep_blocks(kind, _row_bytes(parameter, kind, blocks))
        elif len(kinds) > 1 and parameter.role == "linear" and blocks.linear_parts is not None:
            parts = _neighbours(sources[path])
            if all(rows % blocks.row_multiple == 0 and can_stay(parameter, kind, blocks) for rows, kind in parts):
                parameter.divide([(rows, kind, _row_bytes(parameter, kind, blocks)) for rows, kind in parts])


def _neighbours(sources: list[tuple[tuple[int, int] | None, str]]) -> list[tuple[int, str]]:
    """Rows that lie one after the other with blocks of one type, as (number of rows, type)."""
    parts: list[tuple[int, str]] = []
    for rows, kind in sorted(sources, key=lambda source: source[0] or (0, 0)):
        count = 0 if rows is None else rows[1] - rows[0]
        if parts and parts[-1][1] == kind:
            count += parts.pop()[0]
        parts.append((count, kind))
    return parts


def _row_bytes(parameter: Parameter, kind: str, blocks: BlockOps) -> int:
    block = blocks.formats[kind]
    return parameter.shape[1] // block.size * block.num_bytes


def can_stay(parameter: Parameter, kind: str, blocks: BlockOps) -> bool:
    """Whether the platform multiplies with this weight in blocks of this type."""
    if parameter.role is None or kind not in blocks.formats or len(parameter.shape) != MATRIX:
        return False
    if parameter.role == "experts" and blocks.moe is None:
        return False
    return parameter.unit % blocks.row_multiple == 0 and parameter.shape[1] % blocks.formats[kind].size == 0
