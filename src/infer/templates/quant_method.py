"""A weight quantization method: checkpoints with 8-bit integers and one scale per weight, as numbers while it computes.

Called on the worker thread, while a model is planned and loaded and in each step; the layer owns the storage.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from infer.plugins import PLAIN_WEIGHTS, QuantMethodSpec, StoredTensor, StoredWeight, check_tensor, hookimpl


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


def read(section: dict[str, Any]) -> Int8Format:
    return Int8Format()


def matches(section: dict[str, Any] | None) -> bool:
    """`section` is quantization_config of the checkpoint's config.json."""
    return section is not None and section.get("quant_method") == "my-name"


def as_stored(name: str, weight: Tensor) -> dict[str, Tensor]:
    """What a checkpoint holds of a weight [N, I] in floating point: the kit stores one, and compares what is read."""
    scale = weight.abs().max() / 127
    return {name: (weight / scale).round().to(torch.int8), f"{name}_scale": scale.reshape(1)}


@hookimpl
def infer_quant_methods() -> list[QuantMethodSpec]:
    return [
        QuantMethodSpec(
            name="my-name",
            api=1,
            factory=PLAIN_WEIGHTS,
            matches=f"{__name__}:matches",
            reader=f"{__name__}:read",
            dtypes=("float32", "bfloat16", "float16"),
            example={
                "section": {"quant_method": "my-name"},
                "shape": [48, 32],
                "tolerance": 0.005,
                "stored": f"{__name__}:as_stored",
            },
        )
    ]
