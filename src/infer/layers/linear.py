"""Linear layers and the language-model head; fused projections are row shards of one weight.

Called on the worker thread; the quantization method decides how a weight is stored and applied.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from infer.layers.parameter import Layer, Parameter, moved_into

if TYPE_CHECKING:
    from infer.layers.embedding import Embedding
    from infer.plugins.model import BuildContext


class Linear(Layer):
    """y = x W^T + b. Parameters: what the quantization method creates ("weight" for plain ones), and "bias"."""

    def __init__(self, context: BuildContext, in_features: int, out_features: int, *, bias: bool = False) -> None:
        self.ops = context.ops
        self.quant = context.quant
        self.storage = context.quant.create(out_features, in_features, context.dtype, context.device)
        self.slots = {
            name: Parameter(tensor, role="linear" if tuple(tensor.shape) == (out_features, in_features) else None)
            for name, tensor in self.storage.items()
        }
        self.blocks: str | None = None
        """Type of the stored blocks that the weight stays in."""
        self.parts: list[tuple[Tensor, str]] = []
        """Packed blocks and their type, where neighbouring rows have different ones."""
        self.bias = Parameter(torch.empty(out_features, dtype=context.dtype, device=context.device)) if bias else None

    def children(self) -> Iterator[tuple[str, Parameter | Layer]]:
        yield from self.slots.items()
        if self.bias is not None:
            yield "bias", self.bias

    def finalize(self) -> None:
        """Hand the filled weight to the quantization method; its slots are empty afterwards."""
        for slot in self.slots.values():
            if slot.blocks is not None:
                slot.pack(self.ops)
                self.blocks = slot.blocks
                self.parts = [(part.data, str(part.blocks)) for part in slot.parts]
        filled = {name: slot.data for name, slot in self.slots.items() if not slot.parts}
        filled |= {f"part.{i}": data for i, (data, _) in enumerate(self.parts)}
        self.slots = {}
        if self.blocks is not None:
            self.storage = filled
            return
        made = self.quant.finalize(filled, self.ops)
        self.storage = {name: moved_into(filled[name], new) if name in filled else new for name, new in made.items()}

    def tensors(self) -> Iterator[Tensor]:
        slots = [piece.data for slot in self.slots.values() for piece in slot.pieces()]
        yield from slots or self.storage.values()
        if self.bias is not None:
            yield self.bias.data

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out]."""
        bias = None if self.bias is None else self.bias.data
        blocks = self.ops.blocks
        if self.parts and blocks is not None and blocks.linear_parts is not None:
            return blocks.linear_parts(x, self.parts, bias, x.dtype)
        if self.blocks is not None and blocks is not None:
            return blocks.linear(x, self.storage["weight"], self.blocks, bias, x.dtype)
        return self.quant.apply(self.storage, x, bias, self.ops)


class LMHead(Layer):
    """Hidden states to vocabulary logits. Tied: the embedding's own parameter, counted and loaded once."""

    def __init__(
        self, context: BuildContext, vocab_size: int, hidden_size: int, *, tied_to: Embedding | None = None
    ) -> None:
        self.ops = context.ops
        self.weight = (
            tied_to.weight
            if tied_to is not None
            else Parameter(
                torch.empty(vocab_size, hidden_size, dtype=context.dtype, device=context.device), role="vocabulary"
            )
        )

    def finalize(self) -> None:
        """In the platform's order from here on; a tied embedding reads its rows from there."""
        self.weight.pack(self.ops)

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [M, hidden] -> fp32 [M, vocab]."""
        if self.weight.blocks is not None and self.ops.blocks is not None:
            return self.ops.blocks.linear(hidden, self.weight.data, self.weight.blocks, None, torch.float32)
        if self.ops.head_logits is not None:
            return self.ops.head_logits(hidden, self.weight.data)
        return self.ops.linear(hidden, self.weight.data, None).float()
