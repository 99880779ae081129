"""Cache writes and row gathers in plain torch. Called on the worker thread; `write_kv` changes the cache in place."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from infer.backends.reference.scratch import Scratch
from infer.plugins.platform import UNSCALED, KVScales

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


def write_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    scales: KVScales = UNSCALED,
) -> None:
    """(k [T, K, D], v [T, K, D'], k_cache [blocks, block_size, K, D], v_cache, slot_mapping [T]): in place."""
    for new, cache, scale in ((k, k_cache, scales[0]), (v, v_cache, scales[1])):
        flat = cache.view(-1, *cache.shape[2:])
        if cache.dtype == FP8:  # torch copies bytes by index, not this dtype
            flat.view(torch.uint8).index_copy_(0, slot_mapping, to_fp8(new, scale).view(torch.uint8))
        else:
            flat.index_copy_(0, slot_mapping, new.to(cache.dtype))


def to_fp8(x: Tensor, scale: float) -> Tensor:
    """x / scale rounded to nearest even; beyond the largest number it is that number (torch's own rounding gives NaN)."""
    return (x.float() / scale).clamp_(-FP8_MAX, FP8_MAX).to(FP8)


def embedding(ids: Tensor, weight: Tensor, scratch: Scratch | None = None) -> Tensor:
    """(ids [T] int64, weight [V, N]) -> [T, N]."""
    out = None if scratch is None else scratch.place((len(ids), weight.shape[1]), weight.dtype)
    if out is None:
        return F.embedding(ids, weight)
    if scratch is not None and not scratch.dry:
        torch.index_select(weight, 0, ids, out=out)
    return out


def gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    """(x [T, N], rows [M] int64) -> [M, N]."""
    return x.index_select(0, rows)
