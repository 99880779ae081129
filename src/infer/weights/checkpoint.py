"""What a checkpoint format offers: facts without reading data, then one tensor at a time.

Blocking; used on the worker thread while planning and loading.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as stored. Names are Hugging Face's; a GGUF is translated by `plugins.model.GGUFNames`."""

    name: str
    shape: tuple[int, ...]
    stored_dtype: str
    """"F32", "BF16", "Q4_1", ..."""
    stored_bytes: int


class Checkpoint(Protocol):
    """An opened checkpoint. Opening reads headers only."""

    def tensors(self) -> dict[str, TensorInfo]: ...

    def read(self, name: str, dtype: torch.dtype | None) -> Tensor:
        """The whole tensor on CPU, dequantised, cast to dtype (None: as stored, fp32 for quantised blocks).
        The result owns its memory. Raises `WeightError` naming the tensor when the file is damaged."""
        ...

    def read_blocks(self, name: str) -> Tensor:
        """A quantised matrix as it is stored: uint8 [rows, bytes of a row]. Only of formats that store blocks."""
        ...

    def close(self) -> None:
        """Release file mappings."""
        ...

    def metadata(self) -> dict[str, Any]: ...
