"""AWQ checkpoints (arXiv:2306.00978) in AutoAWQ's "gemm" layout: 4 bits with a zero point, eight output features to an int32.

Worker thread, while loading; pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from infer.errors import UnsupportedModelError
from infer.plugins.checkpoint_format import (
    GroupedRows,
    StoredTensor,
    StoredWeight,
    check_group_size,
    check_matrix,
    check_parts,
)
from infer.plugins.hookspecs import hookimpl
from infer.plugins.quant_method import API_VERSION, PLAIN_WEIGHTS, QuantMethodSpec

SUFFIX = ".qweight"
PER = 8
"""Output features of an int32."""
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Nibble that each of them is in, lowest first."""


class AWQFormat:
    """qweight int32 [I, N / 8], qzeros int32 [G, N / 8], scales [G, N]."""

    def __init__(self, section: dict[str, Any]) -> None:
        bits, version = section.get("bits", section.get("w_bit")), str(section.get("version", "gemm")).lower()
        group = section.get("group_size", section.get("q_group_size"))
        if bits != 4 or version != "gemm" or section.get("zero_point", True) is not True:
            raise UnsupportedModelError(
                f"AWQ with bits={bits!r}, version={version!r}, zero_point={section.get('zero_point', True)!r} is not "
                "supported; 4 bits in version 'gemm' with zero points are"
            )
        self.group_size = check_group_size("AWQ", group)

    def weights(self, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredWeight]:
        found = {}
        for name, stored in tensors.items():
            if not name.endswith(SUFFIX):
                continue
            check_matrix(name, stored)
            prefix, columns, rows = name.removesuffix(SUFFIX), stored.shape[0], stored.shape[-1] * PER
            group = columns if self.group_size == -1 else self.group_size
            groups = -(-columns // group)
            shapes = {
                "qweight": ((columns, rows // PER), ("I32",)),
                "qzeros": ((groups, rows // PER), ("I32",)),
                "scales": ((groups, rows), ("F16", "BF16", "F32")),
            }
            sources = check_parts(tensors, prefix, shapes)
            found[f"{prefix}.weight"] = StoredWeight(
                shape=(rows, columns), sources=sources, group_size=group, levels=16, zero=None
            )
        return found

    def rows(self, weight: StoredWeight, parts: Mapping[str, Tensor], start: int, stop: int) -> GroupedRows:
        quants, zeros = (_unpack(parts[part], start, stop) for part in ("qweight", "qzeros"))
        scales = parts["scales"][:, start:stop].float().t().contiguous()
        return GroupedRows(quants=quants, scales=scales, zeros=zeros.float())


def _unpack(packed: Tensor, start: int, stop: int) -> Tensor:
    """int32 [m, N / 8] -> the output features start .. stop, uint8 [stop - start, m]."""
    first = start // PER
    some = packed[:, first : -(-stop // PER)].clone(memory_format=torch.contiguous_format)
    quants = some.view(torch.uint8).view(len(packed), -1, PER // 2)
    nibbles = torch.stack((quants & 15, quants >> 4), dim=-1).view(len(packed), -1, PER)
    features = nibbles[..., list(PLACES)].reshape(len(packed), -1)
    return features[:, start - first * PER :][:, : stop - start].t().contiguous()


def read(section: dict[str, Any]) -> AWQFormat:
    return AWQFormat(section)


def matches(section: dict[str, Any] | None) -> bool:
    return section is not None and section.get("quant_method") == "awq"


@hookimpl
def infer_quant_methods() -> list[QuantMethodSpec]:
    return [
        QuantMethodSpec(
            name="awq",
            api=API_VERSION,
            factory=PLAIN_WEIGHTS,
            matches=f"{__name__}:matches",
            reader=f"{__name__}:read",
            dtypes=("float32", "bfloat16", "float16"),
            example={
                "section": {"quant_method": "awq", "bits": 4, "group_size": 32},
                "shape": [48, 32],
                "tolerance": 0.0,
            },
        )
    ]
