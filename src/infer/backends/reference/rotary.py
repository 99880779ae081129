"""Rotary embedding in plain torch. Called on the worker thread; pure."""

from __future__ import annotations

import torch
from torch import Tensor

from infer.backends.reference.scratch import Scratch


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor]:
    """(q [T, H, D], k [T, K, D], cos [T, R], sin [T, R]) -> rotated q, k; rotate-half over the first 2R of D.

    The products are taken in the dtype of cos and sin (fp32 from the layers) and rounded once.
    """
    heads = q.shape[1]
    rotated = scratch.place((q.shape[0], heads + k.shape[1], q.shape[2]), q.dtype)
    if rotated is None:
        rotated = _rotated(q, k, cos, sin)
    else:
        for rows in scratch.tiles(rotated):
            rotated[rows] = _rotated(q[rows], k[rows], cos[rows], sin[rows])
    return rotated[:, :heads], rotated[:, heads:]


def _rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    heads = torch.cat((q, k), dim=1)  # one pass over both: calls cost more than copies at decode
    half = cos.shape[-1]
    first, second = heads[..., :half], heads[..., half : 2 * half]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    parts = [first * cos - second * sin, second * cos + first * sin]
    if 2 * half < heads.shape[-1]:
        parts.append(heads[..., 2 * half :].to(parts[0].dtype))
    return torch.cat(parts, dim=-1).to(q.dtype)
