"""A safetensors directory as a checkpoint: one tensor at a time, each read straight into the memory it will live in.

Worker thread, blocking. Plain reads instead of a mapping: no file pages in our memory, and no SIGBUS if a file shrinks.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from infer.errors import WeightError
from infer.weights.checkpoint import TensorInfo
from infer.weights.file_reading import read_exactly
from infer.weights.safetensors_header import StoredTensor, read_headers

CHUNK_BYTES: Final = 256 << 10
"""Read and cast at once when the stored dtype is not the wanted one. Small: freed blocks of megabytes fragment the heap."""
DTYPES: Final = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E8M0": torch.float8_e8m0fnu, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16,
    "U8": torch.uint8, "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip


class SafetensorsCheckpoint:
    """`weights.checkpoint.Checkpoint` over a directory of safetensors files, sharded or not."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self._tensors, self._metadata = read_headers(self.directory)

    def tensors(self) -> dict[str, TensorInfo]:
        return {
            name: TensorInfo(name, stored.shape, stored.dtype, stored.nbytes) for name, stored in self._tensors.items()
        }

    def metadata(self) -> dict[str, Any]:
        return dict(self._metadata)

    def close(self) -> None:
        """Nothing stays open between reads."""

    def read_blocks(self, name: str) -> Tensor:
        raise WeightError(f"{self.directory} holds no blocks; tensor {name!r} is plain", tensor=name)

    def read(self, name: str, dtype: torch.dtype | None) -> Tensor:
        stored = self._tensors.get(name)
        if stored is None:
            raise WeightError(f"{self.directory} has no tensor {name!r}", tensor=name)
        own = DTYPES[stored.dtype]
        out = torch.empty(stored.shape, dtype=dtype or own)
        if out.numel() == 0:
            return out
        try:
            fd = os.open(stored.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise WeightError(
                f"cannot open {stored.path} for tensor {name!r}: {error.strerror}", tensor=name
            ) from error
        try:
            if os.fstat(fd).st_size != stored.file_bytes:
                raise WeightError(f"{stored.path} changed since it was opened; load the model again", tensor=name)
            flat = out.view(-1)
            if out.dtype == own:
                _read(fd, flat, stored, stored.offset)
            else:
                _read_cast(fd, flat, own, stored)
        finally:
            os.close(fd)
        return out


def _read(fd: int, flat: Tensor, stored: StoredTensor, offset: int) -> None:
    read_exactly(fd, flat.view(torch.uint8).numpy().data, offset, stored.path, stored.name)


def _read_cast(fd: int, flat: Tensor, own: torch.dtype, stored: StoredTensor) -> None:
    step = min(len(flat), CHUNK_BYTES // own.itemsize)
    buffer = torch.empty(step, dtype=own)
    for start in range(0, len(flat), step):
        piece = buffer[: min(step, len(flat) - start)]
        _read(fd, piece, stored, stored.offset + start * own.itemsize)
        flat[start : start + len(piece)] = piece
