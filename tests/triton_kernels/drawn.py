"""Inputs for the kernels' tests: seeded values, views with strides, and results that must be right to a few roundings."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st
from torch import Tensor

DTYPES = st.sampled_from([torch.float32, torch.float16])
"""The interpreter computes with the bits of bfloat16 as if they were integers (triton #11584)."""
SEEDS = st.integers(0, 2**31)


def floats(seed: int, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def inside_nan(x: Tensor) -> Tensor:
    """The same values as a view into a larger tensor that is NaN (or the lowest integer) everywhere else."""
    wide = torch.empty([n + 3 for n in x.shape], dtype=x.dtype)
    wide.fill_(math.nan if x.dtype.is_floating_point else torch.iinfo(x.dtype).min)
    view = wide[tuple(slice(1, n + 1) for n in x.shape)]
    view.copy_(x)
    return view


def close(got: Tensor, exact: Tensor, dtype: torch.dtype, ulps: float = 2.0) -> None:
    """Within a few roundings of the output dtype."""
    eps = torch.finfo(dtype).eps
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), exact, rtol=ulps * eps, atol=4 * ulps * eps)
