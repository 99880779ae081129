"""A GGUF as a Hugging Face checkpoint: names translated, blocks dequantised, llama.cpp's changes to the weights undone.

Worker thread, blocking. Owns the opened file; memory beyond the result is one chunk of rows.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor

from infer.errors import UnsupportedModelError, WeightError
from infer.plugins.model import GGUFNames
from infer.weights.checkpoint import TensorInfo
from infer.weights.gguf import GGUFFile, GGUFTensor
from infer.weights.gguf_config import gguf_config
from infer.weights.gguf_dequant import DECODERS, PLAIN_TYPES, dequantize
from infer.weights.gguf_names import translate

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
            self._sources, self.skipped = translate(self._file, names)
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

    def read_blocks(self, name: str) -> Tensor:
        """A matrix as it is stored, [rows, bytes of a row] uint8, rows in the checkpoint's order."""
        tensor = self._source(name)
        rows = tensor.shape[0]
        stored = torch.empty(rows, tensor.nbytes // rows, dtype=torch.uint8)
        self._file.read_into(tensor, 0, stored.view(-1).numpy().data)
        order = self._row_order(name, tensor)
        if order is None:
            return stored
        out = torch.empty_like(stored)
        out[order] = stored
        return out

    def _source(self, name: str) -> GGUFTensor:
        tensor = self._sources.get(name)
        if tensor is None:
            raise WeightError(f"{self._file.path} has no tensor {name!r}", tensor=name)
        return tensor

    def read(self, name: str, dtype: torch.dtype | None) -> Tensor:
        tensor = self._source(name)
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
