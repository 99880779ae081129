"""Token embedding. Called on the worker thread; owns the embedding matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from infer.layers.parameter import Layer, Parameter

if TYPE_CHECKING:
    from infer.plugins.model import BuildContext


class Embedding(Layer):
    """Rows of a [V, N] matrix, optionally scaled. The scale is rounded to the compute dtype first, as Gemma does."""

    def __init__(self, context: BuildContext, vocab_size: int, hidden_size: int, *, scale: float | None = None) -> None:
        self.ops = context.ops
        self.weight = Parameter(torch.empty(vocab_size, hidden_size, dtype=context.dtype, device=context.device))
        self.scale = None if scale is None else torch.tensor(scale).to(context.dtype).item()

    def __call__(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] int64 -> [T, N]."""
        x = self.ops.embedding(token_ids, self.weight.data)
        return x if self.scale is None else x * self.scale
