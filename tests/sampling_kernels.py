"""Operations of sampling that a platform may have, as their definitions say, in torch and NumPy on the host. Pure."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from infer.engine.sampling import philox


def penalties(
    logits: Tensor,
    places: Tensor,
    counts: Tensor,
    settings: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    """`plugins.platform.Ops.penalties`."""
    flat, factor = logits.view(-1), repetition[settings]
    value = flat[places]
    value = torch.where(value > 0, value / factor, value * factor)
    flat[places] = value - counts * frequency[settings] - torch.where(counts > 0, presence[settings], 0.0)


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """`plugins.platform.Ops.uniforms`."""
    given = (tensor.numpy().view(np.uint64) for tensor in (seeds, positions))
    return torch.from_numpy(philox.uniforms(*given))
