"""Contract of a weight quantization method (hook `infer_quant_methods`): how a linear layer stores and applies its weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from infer.plugins.platform import Ops

API_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantMethodSpec:
    name: str
    api: int
    factory: str
    """"module:attr", called as `factory(section: dict | None) -> QuantMethod`."""
    matches: str
    """"module:attr", called with the checkpoint's quantization section (or None), returns bool."""
    dtypes: tuple[str, ...]
    """Activation dtypes it works with."""
    example: dict[str, Any]
    """{"section": ..., "shape": [N, I], "tolerance": relative error of dequantize against the original}."""


class QuantMethod(Protocol):
    """Owns the storage of linear weights. `storage` is a plain dict of tensors kept by the layer."""

    name: str

    def create(
        self, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device
    ) -> dict[str, Tensor]:
        """Uninitialised storage for a weight [out_features, in_features]."""
        ...

    def finalize(self, storage: dict[str, Tensor], ops: Ops) -> dict[str, Tensor]:
        """After all rows are loaded: pack for the platform. May return new tensors; the old ones are dropped."""
        ...

    def apply(self, storage: dict[str, Tensor], x: Tensor, bias: Tensor | None, ops: Ops) -> Tensor:
        """x [T, in] -> [T, out]."""
        ...

    def dequantize(self, storage: dict[str, Tensor]) -> Tensor:
        """-> [out, in] in floating point; the oracle of `apply`."""
        ...
