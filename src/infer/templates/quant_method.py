"""A weight quantization method: checkpoints with 8-bit integers and one scale per weight, as numbers while it computes.

Called on the worker thread, while a model is planned and loaded and in each step; the layer owns the storage.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from infer.plugins import Ops, QuantMethodSpec, StoredTensor, StoredWeight, hookimpl
from infer.plugins.checkpoint_format import check_tensor


class Int8Format:
    """`NAME.weight` I8 [N, I] times `NAME.weight_scale` F32 [1]."""

    def weights(self, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredWeight]:
        found = {}
        for name, stored in tensors.items():
            if name.endswith(".weight") and stored.stored_dtype == "I8" and len(stored.shape) == 2:
                check_tensor(tensors, f"{name}_scale", (1,), ("F32",))
                sources = {"quants": name, "scale": f"{name}_scale"}
                found[name] = StoredWeight(shape=(stored.shape[0], stored.shape[1]), sources=sources)
        return found

    def rows(self, weight: StoredWeight, parts: Mapping[str, Tensor], start: int, stop: int) -> Tensor:
        return parts["quants"][start:stop].float() * parts["scale"].float()


class PlainWeights:
    """What the layers hold: one tensor, in the order in which the platform's kernels read it."""

    name = "my-name"

    def __init__(self, section: dict[str, Any] | None) -> None:
        self._ops: Ops | None = None

    def create(
        self, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device
    ) -> dict[str, Tensor]:
        return {"weight": torch.empty(out_features, in_features, dtype=dtype, device=device)}

    def finalize(self, storage: dict[str, Tensor], ops: Ops) -> dict[str, Tensor]:
        if ops.pack is None or ops.unpack is None:
            return storage
        self._ops = ops
        return {"weight": ops.pack(storage["weight"])}

    def apply(self, storage: dict[str, Tensor], x: Tensor, bias: Tensor | None, ops: Ops) -> Tensor:
        return ops.linear(x, storage["weight"], bias)

    def dequantize(self, storage: dict[str, Tensor]) -> Tensor:
        unpack = None if self._ops is None else self._ops.unpack
        return storage["weight"] if unpack is None else unpack(storage["weight"])


def read(section: dict[str, Any]) -> Int8Format:
    return Int8Format()


def matches(section: dict[str, Any] | None) -> bool:
    """`section` is quantization_config of the checkpoint's config.json."""
    return section is not None and section.get("quant_method") == "my-name"


@hookimpl
def infer_quant_methods() -> list[QuantMethodSpec]:
    return [
        QuantMethodSpec(
            name="my-name",
            api=1,
            factory=f"{__name__}:PlainWeights",
            matches=f"{__name__}:matches",
            reader=f"{__name__}:read",
            dtypes=("float32", "bfloat16", "float16"),
            example={"section": {"quant_method": "my-name"}, "shape": [48, 32], "tolerance": 0.0},
        )
    ]
