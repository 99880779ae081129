"""GGUF block types to fp32 in plain torch, bit-equal to the format's reference (github.com/ggml-org/ggml, ggml-quants.c).

Worker thread, while loading. Pure functions: `blocks` is uint8 [n, bytes per block], the result fp32 [n, elements per block].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def dequantize(data: Tensor, type_name: str) -> Tensor:
    """Whole blocks (uint8, flat) of a type in `DECODERS` -> flat tensor: fp32, or F16/BF16/F32 as stored."""
    plain = PLAIN_TYPES.get(type_name)
    if plain is not None:
        return data.view(plain)
    nbytes, decode = DECODERS[type_name]
    return decode(data.view(-1, nbytes)).reshape(-1)


def _half(blocks: Tensor, start: int) -> Tensor:
    """The fp16 at byte `start` of every block, as fp32 [n, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """[..., w] bytes -> [..., 2, w]: all low nibbles, then all high ones."""
    return torch.stack((packed & 15, packed >> 4), dim=-2)


def _fields(packed: Tensor, bits: int) -> Tensor:
    """[..., w] bytes -> [..., 8 // bits, w]: field k of every byte, least significant first."""
    mask = (1 << bits) - 1
    return torch.stack([(packed >> shift) & mask for shift in range(0, 8, bits)], dim=-2)


def _fifth_bits(blocks: Tensor, start: int) -> Tensor:
    """The 32-bit little-endian mask at byte `start`, as 16s: [n, 32], bit i of the mask at element i."""
    return (_fields(blocks[:, start : start + 4], 1).transpose(-1, -2).reshape(-1, 32)) << 4


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _nibbles(blocks[:, 2:]).reshape(-1, 32).float().sub_(8)


def _q4_1(blocks: Tensor) -> Tensor:
    return (_nibbles(blocks[:, 4:]).reshape(-1, 32).float().mul_(_half(blocks, 0))).add_(_half(blocks, 2))


def _q5_0(blocks: Tensor) -> Tensor:
    quants = _nibbles(blocks[:, 6:]).reshape(-1, 32) | _fifth_bits(blocks, 2)
    return quants.float().sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: Tensor) -> Tensor:
    quants = _nibbles(blocks[:, 8:]).reshape(-1, 32) | _fifth_bits(blocks, 4)
    return quants.float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_half(blocks, 0))


def _q2_k(blocks: Tensor) -> Tensor:
    """16 sub-blocks of 16: 4-bit scale and minimum each [0:16], 2-bit quants [16:80], d [80:82], dmin [82:84]."""
    scales = blocks[:, :16]
    d = (_half(blocks, 80) * (scales & 15).float()).unsqueeze(-1)
    minimum = (_half(blocks, 82) * (scales >> 4).float()).unsqueeze(-1)
    quants = _fields(blocks[:, 16:80].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    return quants.float().mul_(d).sub_(minimum)


def _q3_k(blocks: Tensor) -> Tensor:
    """16 sub-blocks of 16: high-bit mask [0:32], low 2 bits [32:96], 6-bit scales [96:108], d [108:110].
    A set mask bit means that 4 is not subtracted."""
    low = _nibbles(blocks[:, 96:104]).reshape(-1, 16)
    high = _fields(blocks[:, 104:108], 2).reshape(-1, 16)
    d = (_half(blocks, 108) * (low | (high << 4)).float().sub_(32)).unsqueeze(-1)
    quants = _fields(blocks[:, 32:96].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    mask = _fields(blocks[:, :32], 1).reshape(-1, 16, 16)
    return (quants | (mask << 2)).float().sub_(4).mul_(d)


def _k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """12 bytes -> eight 6-bit scales and eight 6-bit minima, fp32 [n, 8, 1]. The upper four of each keep their low
    nibble in the last four bytes and their two high bits on top of the lower four."""
    scale, minimum, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat((scale & 63, (rest & 15) | ((scale >> 2) & 48)), dim=1)
    minima = torch.cat((minimum & 63, (rest >> 4) | ((minimum >> 2) & 48)), dim=1)
    return scales.float().unsqueeze(-1), minima.float().unsqueeze(-1)


def _q4_k(blocks: Tensor) -> Tensor:
    """8 sub-blocks of 32: d [0:2], dmin [2:4], scales [4:16], 4-bit quants [16:144]."""
    scales, minima = _k_scales(blocks[:, 4:16])
    quants = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    d, dmin = _half(blocks, 0).unsqueeze(-1), _half(blocks, 2).unsqueeze(-1)
    return quants.float().mul_(d * scales).sub_(dmin * minima)


def _q5_k(blocks: Tensor) -> Tensor:
    """As Q4_K, with the fifth bits [16:48] before the quants [48:176]."""
    scales, minima = _k_scales(blocks[:, 4:16])
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    quants = low | (_fields(blocks[:, 16:48], 1) << 4)
    d, dmin = _half(blocks, 0).unsqueeze(-1), _half(blocks, 2).unsqueeze(-1)
    return quants.float().mul_(d * scales).sub_(dmin * minima)


def _q6_k(blocks: Tensor) -> Tensor:
    """16 sub-blocks of 16: low nibbles [0:128], high 2 bits [128:192], int8 scales [192:208], d [208:210]."""
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 8, 32)
    high = _fields(blocks[:, 128:192].reshape(-1, 2, 32), 2).reshape(-1, 8, 32)
    scales = blocks[:, 192:208].view(torch.int8).float()
    d = (_half(blocks, 208) * scales).unsqueeze(-1)
    return (low | (high << 4)).reshape(-1, 16, 16).float().sub_(32).mul_(d)


PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DECODERS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q8_0": (34, _q8_0),
    "Q2_K": (84, _q2_k),
    "Q3_K": (110, _q3_k),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
}
