"""How tensors are told to the library: the number of a dtype, and the shape of a packed weight. Pure."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
LANES = 16
"""Rows of a weight that lie side by side when it is packed."""
PACKED_DIM = 4
"""A packed weight has the shape [N / 16, I / P, 16, P]; see csrc/packed.h."""


def dtype_number(*tensors: Tensor) -> int:
    """The library's number of the one dtype that all of them have. Raises `TypeError` for others."""
    first = tensors[0].dtype
    kind = DTYPES.get(first)
    for tensor in tensors[1:]:  # a plain loop: this runs a few hundred times a step
        if tensor.dtype is not first:
            kind = None
    if kind is None:
        names = ", ".join(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)
        raise TypeError(f"native kernels take float32 or bfloat16, all of one kind, not {names}")
    return kind
