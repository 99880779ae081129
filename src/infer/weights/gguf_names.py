"""Which checkpoint tensor each tensor of a GGUF stands for, by the names that a model plugin declares.

Any thread, no tensor library; pure. Owns nothing.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Final

from infer.errors import WeightError
from infer.plugins.model import GGUFNames
from infer.weights.gguf import GGUFFile, GGUFTensor
from infer.weights.gguf_config import ROPE_FACTORS

SKIPPED: Final = (ROPE_FACTORS, "blk.{i}.attn_rot_embd.weight")
"""Tensors that stand for no checkpoint tensor: the config carries the first, the second is a constant of old files."""


def stored_types(file: GGUFFile, names: GGUFNames) -> dict[str, str]:
    """Checkpoint name -> block type of every quantised tensor."""
    sources, _ = translate(file, names)
    return {name: tensor.type.name for name, tensor in sources.items() if tensor.type.block > 1}


def translate(file: GGUFFile, names: GGUFNames) -> tuple[Mapping[str, GGUFTensor], tuple[str, ...]]:
    """HF name -> stored tensor, and the names left out on purpose."""
    sources: dict[str, GGUFTensor] = {}
    skipped: list[str] = []
    for tensor in file.tensors.values():
        layer = re.search(r"\.(0|[1-9][0-9]{0,8})\.", tensor.name)
        number = layer.group(1) if layer else ""
        template = tensor.name[: layer.start(1)] + "{i}" + tensor.name[layer.end(1) :] if layer else tensor.name
        if template in SKIPPED:
            skipped.append(tensor.name)
            continue
        target = names.tensors.get(template)
        if target is None:
            raise WeightError(
                f"{file.path}: tensor {tensor.name!r} has no place in {names.architecture}; "
                "the file was converted for another model or by a newer llama.cpp",
                tensor=tensor.name,
            )
        for name, part in _experts(file, target.replace("{i}", number), tensor):
            if name in sources:
                raise WeightError(
                    f"{file.path}: tensors {sources[name].name!r} and {tensor.name!r} are both {name!r}", tensor=name
                )
            sources[name] = part
    return sources, tuple(skipped)


def _experts(file: GGUFFile, name: str, tensor: GGUFTensor) -> Iterator[tuple[str, GGUFTensor]]:
    """The tensor itself, or, when its name is one per expert, the pieces of the stack [E, rows, columns]."""
    if "{e}" not in name:
        yield name, tensor
        return
    if len(tensor.shape) != 3 or tensor.shape[0] < 1:
        raise WeightError(f"{file.path}: tensor {tensor.name!r} of shape {tensor.shape} is no stack of experts")
    count = tensor.shape[0]
    size = tensor.nbytes // count  # blocks never cross rows
    for expert in range(count):
        piece = dataclasses.replace(tensor, shape=tensor.shape[1:], offset=tensor.offset + expert * size, nbytes=size)
        yield name.replace("{e}", str(expert)), piece
