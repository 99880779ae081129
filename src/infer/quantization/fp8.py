"""Checkpoints in 8-bit floats (e4m3): one scale for a weight, or one for each block of it, as DeepSeek-V3 and Qwen3 publish them.

Worker thread, while loading; pure. No block of GGML holds such numbers: weights are expanded to the compute dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from infer.errors import UnsupportedModelError
from infer.plugins.checkpoint_format import StoredTensor, StoredWeight, check_matrix, check_tensor
from infer.plugins.hookspecs import hookimpl
from infer.plugins.quant_method import API_VERSION, PLAIN_WEIGHTS, QuantMethodSpec

MATRIX = 2
SCALES = ("F32", "BF16", "F16")


class FP8Format:
    """weight F8_E4M3 [N, I] times weight_scale (one number), or times weight_scale_inv [N / b0, I / b1], whose name misleads."""

    def __init__(self, section: dict[str, Any]) -> None:
        block, form = section.get("weight_block_size"), section.get("fmt", "e4m3")
        scheme = section.get("activation_scheme", "dynamic")
        if form != "e4m3" or scheme not in ("dynamic", "static"):
            raise UnsupportedModelError(
                f"fp8 with fmt={form!r} and activation_scheme={scheme!r} is not supported; e4m3 with dynamic or static is"
            )
        whole = (
            isinstance(block, list) and len(block) == MATRIX and all(type(size) is int and size > 0 for size in block)
        )
        if block is not None and not whole:
            raise UnsupportedModelError(
                f"fp8 with weight_block_size={block!r} is not supported; two sizes are, or null"
            )
        self.block: tuple[int, int] | None = None if block is None else (block[0], block[1])

    def weights(self, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredWeight]:
        found = {}
        for name, stored in tensors.items():
            if stored.stored_dtype != "F8_E4M3" or not name.endswith(".weight"):
                continue
            check_matrix(name, stored)
            prefix, (rows, columns) = name.removesuffix(".weight"), stored.shape
            scale = f"{prefix}.weight_scale" if self.block is None else f"{prefix}.weight_scale_inv"
            if self.block is None:
                check_tensor(tensors, scale, (1,), SCALES, (), (1, 1))
            else:
                check_tensor(tensors, scale, (-(-rows // self.block[0]), -(-columns // self.block[1])), SCALES)
            activations = f"{prefix}.input_scale"
            found[name] = StoredWeight(
                shape=(rows, columns),
                sources={"weight": name, "scale": scale},
                unused=(activations,) if activations in tensors else (),
            )
        return found

    def rows(self, weight: StoredWeight, parts: Mapping[str, Tensor], start: int, stop: int) -> Tensor:
        values, scale = parts["weight"][start:stop].float(), parts["scale"].float()
        if self.block is None:
            return values * scale.reshape(())
        block_rows = torch.arange(start, stop) // self.block[0]
        block_columns = torch.arange(weight.shape[1]) // self.block[1]
        return values * scale[block_rows][:, block_columns]


def read(section: dict[str, Any]) -> FP8Format:
    return FP8Format(section)


def matches(section: dict[str, Any] | None) -> bool:
    return section is not None and section.get("quant_method") == "fp8"


@hookimpl
def infer_quant_methods() -> list[QuantMethodSpec]:
    return [
        QuantMethodSpec(
            name="fp8",
            api=API_VERSION,
            factory=PLAIN_WEIGHTS,
            matches=f"{__name__}:matches",
            reader=f"{__name__}:read",
            dtypes=("float32", "bfloat16", "float16"),
            example={"section": {"quant_method": "fp8"}, "shape": [48, 32], "tolerance": 0.0},
        )
    ]
