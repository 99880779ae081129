"""Writes checkpoints as GPTQ, AWQ, compressed-tensors and fp8 tools do, from their public descriptions, beside what they mean in
fp64. Independent of the reader: integers are packed one at a time. Owns nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Parts = dict[str, Tensor]
Made = tuple[Parts, np.ndarray]
"""(tensors by suffix, the weight [N, I] in fp64)."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The feature that each nibble of an int32 holds, lowest first (AutoAWQ, gemm)."""


def pack(values: np.ndarray, bits: int, axis: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Unsigned integers along an axis into int32, the first (or `order`'s first) in the lowest bits."""
    per = 32 // bits
    moved = np.moveaxis(values, axis, 0)
    words = np.zeros((len(moved) // per, *moved.shape[1:]), dtype=np.uint64)
    for word in range(len(words)):
        for place in range(per):
            source = word * per + (place if order is None else order[place])
            words[word] |= moved[source].astype(np.uint64) << np.uint64(bits * place)
    return torch.from_numpy(np.moveaxis(words, 0, axis).astype(np.uint32).view(np.int32).copy())


def draw_scales(random: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(random.uniform(2e-3, 2e-2, shape)).to(dtype)


def gptq(random: np.random.Generator, rows: int, columns: int, section: dict[str, Any]) -> Made:
    bits, size = section["bits"], section["group_size"]
    group = columns if size == -1 else size
    count = -(-columns // group)
    quants = random.integers(0, 1 << bits, (columns, rows))
    zeros = random.integers(1, 1 << bits, (count, rows))
    if section.get("sym", True):
        zeros[:] = 1 << (bits - 1)
    groups = np.arange(columns) // group
    if section.get("desc_act"):
        random.shuffle(groups)
    scales = draw_scales(random, (count, rows), torch.float16)
    exact = scales.double().numpy()[groups] * (quants - zeros[groups])
    stored = zeros if section.get("checkpoint_format") == "gptq_v2" else zeros - 1
    parts = {"qweight": pack(quants, bits, 0), "qzeros": pack(stored, bits, 1), "scales": scales}
    return parts | {"g_idx": torch.from_numpy(groups).int()}, exact.T


def awq(random: np.random.Generator, rows: int, columns: int, section: dict[str, Any]) -> Made:
    group = columns if section["group_size"] == -1 else section["group_size"]
    count = -(-columns // group)
    quants, zeros = random.integers(0, 16, (columns, rows)), random.integers(0, 16, (count, rows))
    scales = draw_scales(random, (count, rows), torch.float16)
    groups = np.arange(columns) // group
    exact = scales.double().numpy()[groups] * (quants - zeros[groups])
    packed = {"qweight": pack(quants, 4, 1, AWQ_ORDER), "qzeros": pack(zeros, 4, 1, AWQ_ORDER)}
    return packed | {"scales": scales}, exact.T


def compressed(random: np.random.Generator, rows: int, columns: int, section: dict[str, Any]) -> Made:
    rule = section["config_groups"]["group_0"]["weights"]
    strategy, bits = rule["strategy"], rule["num_bits"]
    group = rule["group_size"] if strategy == "group" else columns
    groups = np.arange(columns) // group
    shape = (1,) if strategy == "tensor" else (rows, -(-columns // group))
    if strategy == "block":
        down, right = rule["block_structure"]
        shape = (-(-rows // down), -(-columns // right))
    scales = draw_scales(random, shape, torch.bfloat16)
    wide = scales.double().numpy()
    if strategy == "block":
        wide = wide[np.arange(rows)[:, None] // down, np.arange(columns) // right]
    elif strategy != "tensor":
        wide = wide[:, groups]
    if rule["type"] == "float":
        values = torch.from_numpy(random.standard_normal((rows, columns)) * 100).to(torch.float8_e4m3fn)
        return {"weight": values, "weight_scale": scales}, values.double().numpy() * wide
    half = 1 << (bits - 1)
    quants, zeros = random.integers(-half, half, (rows, columns)), np.zeros((rows, shape[-1]), dtype=np.int64)
    parts: Parts = {"weight_scale": scales}
    if not rule["symmetric"]:
        zeros = random.integers(-half, half, zeros.shape)
    if section["format"] == "pack-quantized":
        parts |= {"weight_packed": pack(quants + half, bits, 1), "weight_shape": torch.tensor([rows, columns])}
        if not rule["symmetric"]:
            parts["weight_zero_point"] = pack(zeros + half, bits, 0)
    else:
        parts["weight"] = torch.from_numpy(quants).to(torch.int8)
        if not rule["symmetric"]:
            parts["weight_zero_point"] = torch.from_numpy(zeros).to(torch.int8)
    return parts, wide * (quants - (zeros[:, groups] if strategy != "tensor" else 0))


def fp8(random: np.random.Generator, rows: int, columns: int, section: dict[str, Any]) -> Made:
    values = torch.from_numpy(random.standard_normal((rows, columns)) * 100).to(torch.float8_e4m3fn)
    block = section.get("weight_block_size")
    if block is None:
        scale = torch.tensor(0.0117)
        exact = values.double().numpy() * scale.double().item()
        return {"weight": values, "weight_scale": scale, "input_scale": torch.tensor(0.5)}, exact
    scales = draw_scales(random, (-(-rows // block[0]), -(-columns // block[1])), torch.float32)
    wide = scales.double().numpy()[np.arange(rows)[:, None] // block[0], np.arange(columns) // block[1]]
    return {"weight": values, "weight_scale_inv": scales}, values.double().numpy() * wide


WRITERS: dict[str, Callable[[np.random.Generator, int, int, dict[str, Any]], Made]] = {
    "gptq": gptq,
    "awq": awq,
    "compressed-tensors": compressed,
    "fp8": fp8,
}


def quantize_checkpoint(source: Path, target: Path, section: dict[str, Any]) -> Path:
    """A copy of a plain checkpoint whose linear layers are quantised, random numbers in them; and beside it, in "plain", the
    same numbers in fp32."""
    shutil.copytree(source, target)
    shutil.copytree(source, target / "plain")
    random = np.random.default_rng(0)
    tensors, plain = load_file(source / "model.safetensors"), {}
    made = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and name.startswith("model.layers.") and not name.endswith("mlp.gate.weight"):
            parts, exact = WRITERS[section["quant_method"]](random, *tensor.shape, section)
            made |= {f"{name.removesuffix('weight')}{suffix}": part.contiguous() for suffix, part in parts.items()}
            plain[name] = torch.from_numpy(exact.copy()).float()
        else:
            made[name] = plain[name] = tensor
    save_file(made, target / "model.safetensors", metadata={"format": "pt"})
    save_file(plain, target / "plain" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    return target
