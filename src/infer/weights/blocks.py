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
    """Turn parameters into slots for raw blocks where all tensors that fill one are of one type the platform knows.

    `stored` is tensor name -> block type. The others are dequantised while they are read.
    """
    kinds: dict[str, set[str]] = {}
    for name, target in model.weight_table().targets.items():
        kinds.setdefault(target.path, set()).add(stored.get(name, ""))
    for path, parameter in named_parameters(cast(Layer, model)).items():
        found = kinds.get(path, set())
        kind = next(iter(found), "")
        if len(found) == 1 and kind and can_stay(parameter, kind, blocks):
            block = blocks.formats[kind]
            parameter.keep_blocks(kind, parameter.shape[1] // block.size * block.num_bytes)


def can_stay(parameter: Parameter, kind: str, blocks: BlockOps) -> bool:
    """Whether the platform multiplies with this weight in blocks of this type."""
    if parameter.role is None or kind not in blocks.formats or len(parameter.shape) != MATRIX:
        return False
    if parameter.role == "experts" and blocks.moe is None:
        return False
    return parameter.unit % blocks.row_multiple == 0 and parameter.shape[1] % blocks.formats[kind].size == 0
