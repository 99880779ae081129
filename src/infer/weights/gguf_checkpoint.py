"""A GGUF as a Hugging Face checkpoint: names translated, blocks dequantised, llama.cpp's changes to the weights undone.

Worker thread, blocking. Owns the opened file; memory beyond the result is one chunk of rows.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from infer.errors import UnsupportedModelError, WeightError
from infer.plugins.model import GGUFNames
from infer.weights.checkpoint import TensorInfo
from infer.weights.gguf import GGUFFile, GGUFTensor
from infer.weights.gguf_config import ROPE_FACTORS, gguf_config
from infer.weights.gguf_dequant import DECODERS, PLAIN_TYPES, dequantize

SKIPPED: Final = (ROPE_FACTORS, "blk.{i}.attn_rot_embd.weight")
"""Tensors that stand for no checkpoint tensor: the config carries the first, the second is a constant of old files."""
CHUNK_ELEMENTS: Final = 1 << 17
"""Elements dequantised at once: small enough for the caches and for the allocator to find room again."""


class GGUFCheckpoint:
    """`weights.checkpoint.Checkpoint` over a GGUF file. Every tensor is translated, or listed in `skipped`;
    one that is neither raises `WeightError`."""

    def __init__(self, path: str | os.PathLike[str], names: GGUFNames) -> None:
        self._file = GGUFFile.open(path)
        try:
            self._names = names
            self._config = gguf_config(self._file, names)
            self._sources, self.skipped = _translate(self._file, names)
        except BaseException:
            self._file.close()
            raise

    def tensors(self) -> dict[str, TensorInfo]:
        return {
            name: TensorInfo(name, tensor.shape, tensor.type.name, tensor.nbytes)
            for name, tensor in self._sources.items()
        }

    def metadata(self) -> dict[str, Any]:
        return dict(self._file.metadata)

    def config(self) -> dict[str, Any]:
        """The checkpoint's `config.json`, as `gguf_config` reconstructs it."""
        return dict(self._config)

    def close(self) -> None:
        self._file.close()

    def read(self, name: str, dtype: torch.dtype | None) -> Tensor:
        tensor = self._sources.get(name)
        if tensor is None:
            raise WeightError(f"{self._file.path} has no tensor {name!r}", tensor=name)
        stored = PLAIN_TYPES.get(tensor.type.name)
        if stored is None and tensor.type.name not in DECODERS:
            raise UnsupportedModelError(
                f"{self._file.path}: tensor {name!r} ({tensor.name}) is stored as {tensor.type.name}, which is not "
                f"supported; supported are {', '.join([*PLAIN_TYPES, *DECODERS])}"
            )
        columns = tensor.shape[-1] if len(tensor.shape) > 1 or stored is None else 1  # a vector's rows are its elements
        rows = math.prod(tensor.shape) // columns
        out = torch.empty((rows, columns), dtype=dtype or stored or torch.float32)
        order = self._row_order(name, tensor)
        offset = self._norm_offset(name)
        row = 0
        for chunk in self._row_chunks(tensor, rows, columns):
            if offset:
                chunk = chunk.float() - offset
            end = row + len(chunk)
            if order is None:
                out[row:end] = chunk
            else:
                out[order[row:end]] = chunk.to(out.dtype)
            row = end
        return out.view(tensor.shape)

    def _row_chunks(self, tensor: GGUFTensor, rows: int, columns: int) -> Iterator[Tensor]:
        """The tensor as [n, columns] pieces, dequantised; the storage of a piece is used again for the next."""
        row_bytes = tensor.nbytes // rows
        step = min(rows, max(1, CHUNK_ELEMENTS // columns))
        buffer = torch.empty(step * row_bytes, dtype=torch.uint8)
        view = buffer.numpy().data
        for row in range(0, rows, step):
            length = min(step, rows - row) * row_bytes
            self._file.read_into(tensor, row * row_bytes, view[:length])
            yield dequantize(buffer[:length], tensor.type.name).view(-1, columns)

    def _row_order(self, name: str, tensor: GGUFTensor) -> Tensor | None:
        """Where each stored row belongs, for q and k projections whose heads llama.cpp interleaves:
        stored 2j and 2j + 1 of a head are rows j and j + half of the checkpoint."""
        key = next((key for suffix, key in self._names.permuted.items() if name.endswith(suffix)), None)
        if key is None:
            return None
        heads, rows = self._config.get(key), tensor.shape[0]
        quantized_bias = len(tensor.shape) == 1 and tensor.type.name not in PLAIN_TYPES
        if not isinstance(heads, int) or heads < 1 or rows % (2 * heads) or len(tensor.shape) > 2 or quantized_bias:
            raise WeightError(
                f"{self._file.path}: tensor {tensor.name!r} of shape {tensor.shape} cannot be split into "
                f"{key}={heads} heads of rotary pairs",
                tensor=name,
            )
        return torch.arange(rows).view(heads, 2, rows // heads // 2).transpose(1, 2).reshape(-1)

    def _norm_offset(self, name: str) -> float:
        return self._names.norm_offset if name.endswith("norm.weight") else 0.0


def _translate(file: GGUFFile, names: GGUFNames) -> tuple[Mapping[str, GGUFTensor], tuple[str, ...]]:
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
