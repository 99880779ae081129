"""Which weights become blocks while they are loaded, and how each row gets there (`model.quantization`).

Worker thread, between building a model and loading it; owns nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
from torch import Tensor

from infer.errors import ConfigError
from infer.layers.parameter import Layer, named_parameters
from infer.plugins.model import CausalLM
from infer.plugins.platform import BlockOps
from infer.plugins.quant_method import LoadTimeMethod, SupportsPlatformEncoders
from infer.weights.blocks import MATRIX, can_stay
from infer.weights.gguf import GGML_TYPES, GGMLType
from infer.weights.gguf_dequant import dequantize

Encode = Callable[[Tensor], Tensor]
SIZES = {kind.name: kind for kind in GGML_TYPES.values()}
"""Elements and bytes of a block, by type."""
ROWS = 16
"""Weights whose rows do not divide by this stay plain on every platform."""
PIECE = 1 << 20
"""Elements that a platform's encoder, which divides them among its threads, is given at a time."""


@dataclass(slots=True)
class AtLoad:
    """What became of the weights that a method quantises, by path."""

    in_blocks: list[str] = field(default_factory=list)
    expanded: list[str] = field(default_factory=list)
    """Rounded to blocks, and expanded: the platform does not multiply with these."""
    left: list[str] = field(default_factory=list)
    """Plain: the shape does not divide into blocks."""

    def notices(self, method: str, platform: str) -> list[str]:
        """What the operator should know. Raises `ConfigError` when nothing is quantised."""
        setting = f"model.quantization={method}"
        if not self.in_blocks and not self.expanded:
            raise ConfigError(
                f"{setting}: none of the {len(self.left)} weights has rows in multiples of {ROWS} and columns that divide into "
                "blocks; leave the setting out",
                fields=("model.quantization",),
            )
        words = []
        if self.expanded:
            words.append(
                f"{setting}: {len(self.expanded)} weights are rounded and then expanded, because platform {platform!r} does not "
                "multiply with their blocks or model.expand_quantized is set: they take the memory of plain weights"
            )
        if self.left:
            words.append(
                f"{setting}: {len(self.left)} weights stay plain, their shapes do not divide: {self.left[0]}, ..."
            )
        return words


def quantize_at_load(model: CausalLM, method: LoadTimeMethod, blocks: BlockOps | None, stored: torch.dtype) -> AtLoad:
    """Give every weight that `method` quantises its converter. `stored` is the checkpoint's dtype.

    Where the platform (`blocks`, None: it has no such kernels) does not multiply with the blocks, their values are expanded
    to the compute dtype: the same numbers, in the memory of plain weights.
    """
    found = AtLoad()
    for path, parameter in named_parameters(cast(Layer, model)).items():
        kind = method.block_type(parameter.role) if parameter.role is not None else None
        if kind is None or len(parameter.shape) != MATRIX:
            continue
        if parameter.shape[1] % SIZES[kind].block or parameter.unit % ROWS:
            found.left.append(f"{path} {list(parameter.shape)}")
            continue
        parameter.in_flight = parameter.unit * parameter.shape[1] * stored.itemsize
        encode: Encode = partial(method.encode, block_type=kind)
        native = _platform_encoder(method, kind, blocks)
        if native is not None:
            parameter.piece = PIECE
            encode = partial(_encode_on, native, encode, SIZES[kind])
        if blocks is not None and can_stay(parameter, kind, blocks):
            form = blocks.formats[kind]
            parameter.keep_blocks(kind, parameter.shape[1] // form.size * form.num_bytes)
            parameter.convert = encode
            found.in_blocks.append(path)
        else:
            parameter.convert = partial(_round_trip, encode=encode, kind=kind)
            found.expanded.append(path)
    return found


def _platform_encoder(
    method: LoadTimeMethod, kind: str, blocks: BlockOps | None
) -> Callable[[Tensor, Tensor], bool] | None:
    """The platform's own, where it makes the same bytes."""
    if blocks is None or not isinstance(method, SupportsPlatformEncoders):
        return None
    return blocks.encoders.get((kind, method.rounding(kind)))


def _encode_on(native: Callable[[Tensor, Tensor], bool], encode: Encode, kind: GGMLType, rows: Tensor) -> Tensor:
    made = torch.empty(len(rows), rows.shape[1] // kind.block * kind.nbytes, dtype=torch.uint8)
    return made if native(rows, made) else encode(rows)  # which says what is wrong with them


def _round_trip(rows: Tensor, encode: Encode, kind: str) -> Tensor:
    return dequantize(encode(rows).reshape(-1), kind).view(rows.shape)
