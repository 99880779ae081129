"""Which weights of a GGUF stay in the blocks they are stored in, because the platform multiplies with them directly.

Worker thread, between building a model and loading it; owns nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from infer.layers.parameter import Layer, named_layers, named_parameters
from infer.plugins.model import CausalLM
from infer.plugins.platform import BlockOps

MATRIX = 2
"""Dimensions of a weight that may stay."""


def keep_stored_blocks(model: CausalLM, stored: Mapping[str, str], blocks: BlockOps) -> None:
    """Turn parameters into slots for raw blocks where all tensors that fill one are of one type the platform knows.

    `stored` is tensor name -> block type. The others are dequantised while they are read.
    """
    root = cast(Layer, model)
    layers = dict(named_layers(root))
    kinds: dict[str, set[str]] = {}
    for name, target in model.weight_table().targets.items():
        kinds.setdefault(target.path, set()).add(stored.get(name, ""))
    for path, parameter in named_parameters(root).items():
        found = kinds.get(path, set())
        kind = next(iter(found), "")
        if len(found) != 1 or kind not in blocks.formats or len(parameter.shape) != MATRIX:
            continue
        rows, columns = parameter.shape
        block = blocks.formats[kind]
        if (
            layers[path.rpartition(".")[0]].takes_blocks
            and rows % blocks.row_multiple == 0
            and columns % block.size == 0
        ):
            parameter.keep_blocks(kind, columns // block.size * block.num_bytes)
