"""A quantization method: checkpoints of signed bytes, with one scale for each output feature.

`Int8Channel` is called on the worker thread while a model is planned and loaded, and owns nothing. `convert` writes such
checkpoints: `python -m infer_int8 SOURCE TARGET`.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from infer import InferError, UnsupportedModelError, WeightError
from infer.plugins import (
    PLAIN_WEIGHTS,
    GroupedRows,
    QuantMethodSpec,
    StoredTensor,
    StoredWeight,
    check_matrix,
    check_tensor,
    hookimpl,
)

NAME = "int8-channel"
VERSION = 1
LARGEST = 127
ZERO = 128
"""Of the unsigned quants that infer computes with, the one that stands for 0."""


class Int8Channel:
    """`NAME.weight` I8 [N, I] times `NAME.weight_scale` F16 [N]."""

    def __init__(self, section: dict[str, Any]) -> None:
        version = section.get("version")
        if version != VERSION:
            raise UnsupportedModelError(
                f"{NAME} with version={version!r} is not supported; {VERSION} is. Install an infer-int8 that reads it, or "
                "convert the checkpoint again"
            )

    def weights(self, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredWeight]:
        found = {}
        for name, stored in tensors.items():
            if not name.endswith(".weight") or stored.stored_dtype != "I8":
                continue
            check_matrix(name, stored)
            rows, columns = stored.shape
            check_tensor(tensors, f"{name}_scale", (rows,), ("F16",))
            found[name] = StoredWeight(
                shape=(rows, columns),
                sources={"quants": name, "scales": f"{name}_scale"},
                # These three tell the platform that its kernels for blocks of 8 bits can have the bytes as they are. All
                # columns of a row share the scale.
                group_size=columns,
                levels=256,
                zero=ZERO,
            )
        return found

    def rows(self, weight: StoredWeight, parts: Mapping[str, Tensor], start: int, stop: int) -> GroupedRows:
        scales = parts["scales"][start:stop].float()[:, None]
        if not bool(scales.isfinite().all()):
            name = weight.sources["scales"]
            raise WeightError(f"tensor {name!r} holds numbers that are not finite; convert again", tensor=name)
        quants = parts["quants"][start:stop].view(torch.uint8) ^ ZERO  # from -128 .. 127 to 0 .. 255
        return GroupedRows(quants=quants, scales=scales, zeros=torch.full_like(scales, ZERO))


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[N, I] in floating point -> int8 [N, I], scales fp16 [N]: the largest of each row becomes 127 or -127.

    The scale is rounded first and the quants fit what it became: rounding it costs nothing but in rows so small (below 0.008)
    that fp16 has few scales for them. Raises `WeightError` for what does not fit.
    """
    wide = weight.double()
    largest = wide.abs().amax(1)
    scales = (largest / LARGEST).half()
    if not bool(scales.isfinite().all()):
        raise WeightError(
            "a weight that is to be quantised holds numbers that are not finite, or larger than 8.3 million"
        )
    short = scales.double() * (LARGEST + 0.5) < largest  # such a scale would cut the largest off: take the next one
    scales = (scales.view(torch.int16) + short).view(torch.float16)
    steps = torch.where(scales == 0, 1.0, scales.double())
    return (wide / steps[:, None]).round_().clamp_(-LARGEST, LARGEST).to(torch.int8), scales


def as_stored(name: str, weight: Tensor) -> dict[str, Tensor]:
    """The tensors of a checkpoint that hold a weight."""
    quants, scales = quantize(weight)
    return {name: quants, f"{name}_scale": scales}


def convert(source: Path, target: Path) -> int:
    """A plain safetensors checkpoint -> the same in `target`, which is made: matrices of the layers quantised, all else as it
    was. Returns how many. Routers of experts stay as they are: a rounded router chooses other experts."""
    config = json.loads((source / "config.json").read_text())
    if "quantization_config" in config:
        raise UnsupportedModelError(f"{source} is quantised already; convert the plain checkpoint")
    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise UnsupportedModelError(f"{source} holds no .safetensors")
    target.mkdir(parents=True)
    index: dict[str, str] = {}
    count = 0
    for file in files:
        made = {}
        for name, tensor in load_file(file).items():
            made[name] = tensor
            chosen = ".layers." in name and name.endswith(".weight") and not name.endswith(".gate.weight")
            if chosen and tensor.dim() == 2 and tensor.is_floating_point():
                made |= as_stored(name, tensor)
                count += 1
        save_file(made, target / file.name, metadata={"format": "pt"})
        index |= dict.fromkeys(made, file.name)
    for other in source.iterdir():
        if other.is_file() and other.suffix != ".safetensors":
            shutil.copy(other, target)
    if len(files) > 1:
        (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    section = {"quant_method": NAME, "version": VERSION}
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": section}, indent=2))
    return count


def read(section: dict[str, Any]) -> Int8Channel:
    return Int8Channel(section)


def matches(section: dict[str, Any] | None) -> bool:
    return section is not None and section.get("quant_method") == NAME


@hookimpl
def infer_quant_methods() -> list[QuantMethodSpec]:
    return [
        QuantMethodSpec(
            name=NAME,
            api=1,
            factory=PLAIN_WEIGHTS,
            matches=f"{__name__}:matches",
            reader=f"{__name__}:read",
            dtypes=("float32", "bfloat16", "float16"),
            example={
                "section": {"quant_method": NAME, "version": VERSION},
                "shape": [48, 64],
                "tolerance": 0.005,
                "stored": f"{__name__}:as_stored",
            },
        )
    ]


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("usage: python -m infer_int8 SOURCE TARGET, two directories")
    try:
        print(convert(Path(sys.argv[1]), Path(sys.argv[2])), "weights quantised")
    except (InferError, OSError) as error:
        raise SystemExit(str(error)) from error
