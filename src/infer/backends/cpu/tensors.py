"""What the kernels must know of a tensor: the number of its dtype, and whether its rows are dense. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
LANES = 16
"""Rows of a weight that lie side by side when it is packed."""
PACKED_DIM = 4
"""A packed weight has the shape [N / 16, I / P, 16, P]; see csrc/packed.h."""
FP8 = 2
"""The library's number of float8_e4m3fn, which keys and values may be stored as."""


def dtype_number(*tensors: Tensor) -> int:
    """The library's number of the one dtype that all of them have."""
    first = tensors[0].dtype
    kind = DTYPES.get(first)
    for tensor in tensors[1:]:  # a plain loop: this runs a few hundred times a step
        if tensor.dtype is not first:
            kind = None
    if kind is None:
        raise TypeError(f"native kernels take float32 or bfloat16, all of one kind, not {_names(tensors)}")
    return kind


def cache_number(k_cache: Tensor, v_cache: Tensor) -> int:
    """The library's number of what keys and values are stored as."""
    if k_cache.dtype is v_cache.dtype is torch.float8_e4m3fn:
        return FP8
    return dtype_number(k_cache, v_cache)


def _names(tensors: Sequence[Tensor]) -> str:
    return ", ".join(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)


def side_by_side(q: Tensor, k: Tensor) -> Tensor | None:
    """q and k as one tensor of more heads, where they lie one after the other in each row of a fused projection."""
    strides = q.stride()
    if strides != k.stride() or q.dtype != k.dtype or strides[2] != 1 or strides[1] != q.shape[2]:
        return None
    if (
        k.data_ptr() != q.data_ptr() + q.shape[1] * q.shape[2] * q.itemsize
        or strides[0] < (q.shape[1] + k.shape[1]) * strides[1]
    ):
        return None
    return q.as_strided((q.shape[0], q.shape[1] + k.shape[1], q.shape[2]), strides)


def with_dense_rows(x: Tensor) -> Tensor:
    """[T, H, D] whose rows of H x D elements are contiguous; the rows themselves may lie apart."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
