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
        self.dtype = context.dtype
        self.weight = Parameter(
            torch.empty(vocab_size, hidden_size, dtype=context.dtype, device=context.device), role="vocabulary"
        )
        self.scale = None if scale is None else torch.tensor(scale).to(context.dtype).item()

    def finalize(self) -> None:
        """Blocks are read in the platform's order; plain rows stay as they are unless a tied head packs them."""
        if self.weight.blocks is not None:
            self.weight.pack(self.ops)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] int64 -> [T, N]."""
        weight = self.weight
        if weight.blocks is not None and self.ops.blocks is not None:
            x = self.ops.blocks.rows(token_ids, weight.data, weight.blocks, weight.shape[1], self.dtype)
        else:
            x = self.ops.embedding(token_ids, weight.data)
        if self.scale is None:
            return x
        return x.mul_(self.scale) if self.ops.scale is None else self.ops.scale(x, self.scale)  # rows of its own
