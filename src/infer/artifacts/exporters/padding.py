"""Rows up to a common length for a batch, such that no expert is buried under padding and none is taken for a real row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer.errors import ArtifactError


@dataclass(frozen=True, slots=True)
class PaddedRoutes:
    expert_ids: NDArray[Any]
    padding_mask: NDArray[np.bool_]
    """[rows]; True for rows that stand for nothing."""


def pad_rows(ids: NDArray[Any], num_rows: int, num_experts: int, *, spread: bool = True) -> PaddedRoutes:
    """Append rows of K distinct experts up to `num_rows`.

    `spread` walks through all experts, so that no expert-parallel rank gets all the padding; without it every row is
    0, 1, ... K - 1. K experts in a row are distinct either way: dropless dispatch relies on that.
    """
    rows, layers, top_k = ids.shape
    if num_rows < rows:
        raise ArtifactError(f"{rows} rows cannot be padded to {num_rows}; cut them first")
    if top_k > num_experts:
        raise ArtifactError(f"{top_k} experts per token of {num_experts} cannot be distinct")
    added = np.arange((num_rows - rows) * top_k if spread else top_k) % num_experts
    if np.iinfo(ids.dtype).max < added.max(initial=0):
        ids = ids.astype(np.min_scalar_type(num_experts - 1))
    rows_added = added.reshape(-1, 1, top_k).astype(ids.dtype)
    padding = np.broadcast_to(rows_added, (num_rows - rows, layers, top_k))
    mask = np.arange(num_rows) >= rows
    return PaddedRoutes(np.concatenate([ids, padding]), mask)
