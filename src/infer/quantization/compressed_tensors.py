"""Checkpoints of compressed-tensors (github.com/vllm-project/compressed-tensors): integers of 4 or 8 bits, or 8-bit floats.

Worker thread, while loading; pure. What a section says of activations is not needed: kernels quantise them in their own, finer
way (32 neighbours share a scale), or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from infer.errors import UnsupportedModelError
from infer.plugins.checkpoint_format import GroupedRows, StoredTensor, StoredWeight, check_matrix, check_tensor
from infer.plugins.hookspecs import hookimpl
from infer.plugins.quant_method import API_VERSION, PLAIN_WEIGHTS, QuantMethodSpec

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
STRATEGIES = ("tensor", "channel", "group", "block")
SCALES = ("BF16", "F16", "F32")
MATRIX = 2


@dataclass(frozen=True, slots=True)
class Scheme:
    """How all quantised weights of a checkpoint are stored."""

    bits: int
    packed: bool
    floats: bool
    symmetric: bool
    strategy: str
    group_size: int
    block: tuple[int, int]


class CompressedTensorsFormat:
    """weight_packed int32 [N, I / p], or weight int8 or F8_E4M3 [N, I]; weight_scale [1], [N, 1], [N, G] or one for each
    block; of asymmetric ones weight_zero_point, packed along N."""

    def __init__(self, section: dict[str, Any]) -> None:
        self.scheme = _scheme(section)

    def weights(self, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredWeight]:
        scheme, found = self.scheme, {}
        part = "weight_packed" if scheme.packed else "weight"
        dtype = "I32" if scheme.packed else "F8_E4M3" if scheme.floats else "I8"
        for name, stored in tensors.items():
            if not name.endswith(f".{part}") or stored.stored_dtype != dtype:
                continue
            check_matrix(name, stored)
            prefix = name.removesuffix(f".{part}")
            rows, columns = stored.shape[0], stored.shape[1] * (32 // scheme.bits if scheme.packed else 1)
            group = scheme.group_size if scheme.strategy == "group" else columns
            sources = {"weight": name, "scale": f"{prefix}.weight_scale"}
            check_tensor(tensors, sources["scale"], *self._scale_shapes(rows, columns))
            if not scheme.symmetric:
                sources["zero"] = f"{prefix}.weight_zero_point"
                groups = -(-columns // group)
                shape = (-(-rows * scheme.bits // 32), groups) if scheme.packed else (rows, groups)
                check_tensor(tensors, sources["zero"], shape, ("I32",) if scheme.packed else ("I8",))
            if f"{prefix}.weight_g_idx" in tensors:
                sources["order"] = f"{prefix}.weight_g_idx"
                check_tensor(tensors, sources["order"], (columns,), ("I32", "I64"))
            grouped = not scheme.floats and "order" not in sources
            others = ("weight_shape", "weight_zero_point", "input_scale", "input_zero_point", "input_global_scale")
            found[f"{prefix}.weight"] = StoredWeight(
                shape=(rows, columns),
                sources=sources,
                unused=tuple(
                    other
                    for other in (f"{prefix}.{o}" for o in others)
                    if other in tensors and other not in sources.values()
                ),
                group_size=group if grouped else 0,
                levels=1 << scheme.bits if grouped else 0,
                zero=1 << (scheme.bits - 1) if scheme.symmetric else None,
            )
        return found

    def rows(self, weight: StoredWeight, parts: Mapping[str, Tensor], start: int, stop: int) -> GroupedRows | Tensor:
        scheme, stored, scales = self.scheme, parts["weight"][start:stop], parts["scale"].float()
        if scheme.strategy == "block":
            by_row, by_column = scheme.block
            scales = scales[torch.arange(start, stop) // by_row][:, torch.arange(weight.shape[1]) // by_column]
        else:
            scales = scales.reshape(1, 1).expand(stop - start, 1) if scales.numel() == 1 else scales[start:stop]
        if scheme.floats:
            return stored.float() * scales
        middle = 1 << (scheme.bits - 1)
        quants = _unpack(stored, scheme.bits) if scheme.packed else stored.view(torch.uint8) ^ 0x80
        zeros = torch.full_like(scales, float(middle))
        if "zero" in parts:
            if scheme.packed:
                unpacked = _unpack(parts["zero"].t().contiguous(), scheme.bits).t()
                zeros = unpacked[start:stop].float()
            else:
                zeros = parts["zero"][start:stop].float() + middle
        groups = parts.get("order")
        return GroupedRows(
            quants=quants, scales=scales, zeros=zeros.contiguous(), groups=None if groups is None else groups.long()
        )

    def _scale_shapes(self, rows: int, columns: int) -> tuple[Any, ...]:
        """The arguments of `check_tensor` behind the name."""
        scheme = self.scheme
        if scheme.strategy == "tensor":
            return (1,), SCALES, (), (1, 1)
        if scheme.strategy == "block":
            return (-(-rows // scheme.block[0]), -(-columns // scheme.block[1])), SCALES
        groups = -(-columns // scheme.group_size) if scheme.strategy == "group" else 1
        return (rows, groups), SCALES, *([(rows,)] if groups == 1 else [])


def _scheme(section: dict[str, Any]) -> Scheme:
    groups = section.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(isinstance(group, dict) for group in groups.values()):
        raise UnsupportedModelError(f"compressed-tensors with config_groups={groups!r:.80} is not supported")
    if section.get("sparsity_config"):
        raise UnsupportedModelError("compressed-tensors with a sparsity_config is not supported; quantised weights are")
    found = {_group_scheme(group, str(group.get("format") or section.get("format"))) for group in groups.values()}
    if len(found) > 1:
        raise UnsupportedModelError("compressed-tensors with several kinds of weights (config_groups) is not supported")
    return found.pop()


def _group_scheme(group: dict[str, Any], form: str) -> Scheme:
    rule = group.get("weights")
    if form not in FORMATS:
        raise UnsupportedModelError(f"compressed-tensors in format={form!r} is not supported; {', '.join(FORMATS)} are")
    if not isinstance(rule, dict):
        raise UnsupportedModelError(f"compressed-tensors with weights={rule!r:.80} is not supported")
    bits, kind, strategy = rule.get("num_bits"), rule.get("type"), rule.get("strategy")
    size, block = rule.get("group_size") or 0, rule.get("block_structure") or [1, 1]
    floats, packed, symmetric = kind == "float", form == "pack-quantized", rule.get("symmetric", True) is True
    fits = (
        (bits == 8 and symmetric and not packed and form != "int-quantized")
        if floats
        else (kind == "int" and form != "float-quantized" and bits in ((4, 8) if packed else (8,)))
    )
    if not fits or strategy not in STRATEGIES or (strategy == "block" and not floats):
        raise UnsupportedModelError(
            f"compressed-tensors in format={form!r} with num_bits={bits!r}, type={kind!r}, symmetric={symmetric}, "
            f"strategy={strategy!r} is not supported"
        )
    sizes = isinstance(block, list) and len(block) == MATRIX and all(type(side) is int and side > 0 for side in block)
    if not sizes or (strategy == "group" and (type(size) is not int or size < 1)):
        raise UnsupportedModelError(
            f"compressed-tensors with group_size={size!r} and block_structure={block!r} is not supported"
        )
    return Scheme(
        int(bits or 0), packed, floats, symmetric, strategy, size if strategy == "group" else 0, (block[0], block[1])
    )


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """int32 [n, m] -> uint8 [n, m * 32 / bits], the lowest bits of each first; a quant is stored plus half its range."""
    quants = packed.clone(memory_format=torch.contiguous_format).view(torch.uint8)  # little-endian; dense in any shape
    if bits == 8:
        return quants
    return torch.stack((quants & 15, quants >> 4), dim=-1).view(len(packed), -1)


def read(section: dict[str, Any]) -> CompressedTensorsFormat:
    return CompressedTensorsFormat(section)


def matches(section: dict[str, Any] | None) -> bool:
    return section is not None and section.get("quant_method") == "compressed-tensors"


EXAMPLE = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
        }
    },
}


@hookimpl
def infer_quant_methods() -> list[QuantMethodSpec]:
    return [
        QuantMethodSpec(
            name="compressed-tensors",
            api=API_VERSION,
            factory=PLAIN_WEIGHTS,
            matches=f"{__name__}:matches",
            reader=f"{__name__}:read",
            dtypes=("float32", "bfloat16", "float16"),
            example={"section": EXAMPLE, "shape": [48, 32], "tolerance": 0.0},
        )
    ]
