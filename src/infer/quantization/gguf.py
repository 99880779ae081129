"""GGUF weights: dequantised while they are read, then plain weights in the compute dtype.

Called on the worker thread; the layer owns the storage. Kernels on packed blocks replace this where they exist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from infer.plugins.hookspecs import hookimpl
from infer.plugins.quant_method import API_VERSION, QuantMethodSpec

if TYPE_CHECKING:
    from infer.plugins.platform import Ops


class GGUFMethod:
    """One tensor, "weight" [N, I]: the checkpoint reader dequantises block formats when the tensor is read."""

    name = "gguf"

    def __init__(self) -> None:
        self._unpack: Callable[[Tensor], Tensor] | None = None

    def create(
        self, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device
    ) -> dict[str, Tensor]:
        return {"weight": torch.empty(out_features, in_features, dtype=dtype, device=device)}

    def finalize(self, storage: dict[str, Tensor], ops: Ops) -> dict[str, Tensor]:
        if ops.pack is None or ops.unpack is None:
            return storage
        self._unpack = ops.unpack
        return {"weight": ops.pack(storage["weight"])}

    def apply(self, storage: dict[str, Tensor], x: Tensor, bias: Tensor | None, ops: Ops) -> Tensor:
        return ops.linear(x, storage["weight"], bias)

    def dequantize(self, storage: dict[str, Tensor]) -> Tensor:
        return storage["weight"] if self._unpack is None else self._unpack(storage["weight"])


def create(section: dict[str, Any] | None) -> GGUFMethod:
    return GGUFMethod()


def matches(section: dict[str, Any] | None) -> bool:
    return section is not None and section.get("quant_method") == "gguf"


@hookimpl
def infer_quant_methods() -> list[QuantMethodSpec]:
    return [
        QuantMethodSpec(
            name="gguf",
            api=API_VERSION,
            factory=f"{__name__}:create",
            matches=f"{__name__}:matches",
            dtypes=("float32", "bfloat16", "float16"),
            example={"section": {"quant_method": "gguf"}, "shape": [48, 32], "tolerance": 0.0},
        )
    ]
