"""GPTQ checkpoints (arXiv:2210.17323) as AutoGPTQ and GPTQModel write them: 4 or 8 bits, eight or four to an int32.

Worker thread, while loading; pure. Act-order (`desc_act`) is read: its columns are in no order of groups, so they are expanded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from infer.errors import UnsupportedModelError, WeightError
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


class GPTQFormat:
    """qweight int32 [I / p, N], qzeros int32 [G, N / p], scales [G, N], g_idx int32 [I]; p quants to an int32, lowest first."""

    def __init__(self, section: dict[str, Any]) -> None:
        bits, group, form = section.get("bits"), section.get("group_size"), section.get("checkpoint_format", "gptq")
        if type(bits) is not int or bits not in (4, 8):
            raise UnsupportedModelError(f"GPTQ with bits={bits!r} is not supported; 4 and 8 are")
        self.group_size = check_group_size("GPTQ", group)
        if form not in ("gptq", "gptq_v2"):
            raise UnsupportedModelError(f"GPTQ in checkpoint_format={form!r} is not supported; gptq and gptq_v2 are")
        if section.get("dynamic"):
            raise UnsupportedModelError("GPTQ with rules of its own for some layers (dynamic) is not supported")
        self.bits: int = bits
        self.ordered = not section.get("desc_act") or group == -1
        self.symmetric = section.get("sym", True) is True
        self.offset = 1 if form == "gptq" else 0
        """What is added to a stored zero point."""

    def weights(self, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredWeight]:
        found = {}
        for name, stored in tensors.items():
            if not name.endswith(SUFFIX):
                continue
            check_matrix(name, stored)
            prefix, per = name.removesuffix(SUFFIX), 32 // self.bits
            rows, columns = stored.shape[-1], stored.shape[0] * per
            group = columns if self.group_size == -1 else self.group_size
            groups = -(-columns // group)
            shapes: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
                "qweight": ((columns // per, rows), ("I32",)),
                "qzeros": ((groups, rows // per), ("I32",)),
                "scales": ((groups, rows), ("F16", "BF16", "F32")),
            }
            if f"{prefix}.g_idx" in tensors:
                shapes["g_idx"] = ((columns,), ("I32", "I64"))
            elif not self.ordered:
                raise WeightError(f"the checkpoint lacks tensor {prefix}.g_idx, which desc_act calls for", tensor=name)
            sources = check_parts(tensors, prefix, shapes)
            middle = 1 << (self.bits - 1)
            found[f"{prefix}.weight"] = StoredWeight(
                shape=(rows, columns),
                sources=sources,
                group_size=group if self.ordered else 0,
                levels=(1 << self.bits) if self.ordered else 0,
                zero=middle if self.symmetric else None,
            )
        return found

    def rows(self, weight: StoredWeight, parts: Mapping[str, Tensor], start: int, stop: int) -> GroupedRows:
        quants = _unpack(parts["qweight"][:, start:stop].t().contiguous(), self.bits)
        per, mask = 32 // self.bits, (1 << self.bits) - 1
        first = start // per
        zeros = _unpack(parts["qzeros"][:, first : -(-stop // per)], self.bits)[:, start - first * per :][
            :, : stop - start
        ]
        zeros = (zeros.int() + self.offset) & mask
        scales = parts["scales"][:, start:stop].float().t().contiguous()
        return GroupedRows(
            quants=quants, scales=scales, zeros=zeros.t().float().contiguous(), groups=self._groups(weight, parts)
        )

    def _groups(self, weight: StoredWeight, parts: Mapping[str, Tensor]) -> Tensor | None:
        """The group of each column, where it is not the one that its place says."""
        index, count = parts.get("g_idx"), len(parts["scales"])
        if index is None:
            return None
        groups, columns = index.long(), weight.shape[1]
        plain = torch.arange(columns) // (columns if self.group_size == -1 else self.group_size)
        if torch.equal(groups, plain) or (self.group_size == -1 and not groups.any()):
            return None if self.ordered else plain
        if int(groups.min()) < 0 or int(groups.max()) >= count:
            name = weight.sources["g_idx"]
            raise WeightError(f"tensor {name!r} names group {int(groups.max())} of {count}", tensor=name)
        return groups


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """int32 [n, m] -> uint8 [n, m * 32 / bits], the lowest bits of each first."""
    quants = packed.clone(memory_format=torch.contiguous_format).view(torch.uint8)  # little-endian; dense in any shape
    if bits == 8:
        return quants
    return torch.stack((quants & 15, quants >> 4), dim=-1).view(len(packed), -1)


def read(section: dict[str, Any]) -> GPTQFormat:
    return GPTQFormat(section)


def matches(section: dict[str, Any] | None) -> bool:
    return section is not None and section.get("quant_method") == "gptq"


@hookimpl
def infer_quant_methods() -> list[QuantMethodSpec]:
    return [
        QuantMethodSpec(
            name="gptq",
            api=API_VERSION,
            factory=PLAIN_WEIGHTS,
            matches=f"{__name__}:matches",
            reader=f"{__name__}:read",
            dtypes=("float32", "bfloat16", "float16"),
            example={
                "section": {"quant_method": "gptq", "bits": 4, "group_size": 32},
                "shape": [48, 32],
                "tolerance": 0.0,
            },
        )
    ]
