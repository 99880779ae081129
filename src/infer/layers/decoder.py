"""A pre-norm decoder block and the decoder that strings blocks together between embedding and head.

Called on the worker thread; owns the parts a model file hands it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from infer.layers.attention import SelfAttention, kv_layout
from infer.layers.embedding import Embedding
from infer.layers.latent_attention import LatentAttention
from infer.layers.linear import LMHead
from infer.layers.mlp import MLP
from infer.layers.moe import SparseMoE
from infer.layers.norm import RMSNorm
from infer.layers.parameter import Layer
from infer.layers.rotary import Rotary

if TYPE_CHECKING:
    from infer.config.model import KVLayout, RoutedLayer
    from infer.plugins.model import ForwardBatch
    from infer.weights.mapping import WeightTable

Angles = tuple[tuple[Tensor, Tensor], ...]
"""(cos, sin) of every rotary of the model, in the order of `Decoder.rotaries`."""


class Block(Protocol):
    """One decoder block. The residual stream travels unnormed beside the branch output `x`; it is None at first."""

    @property
    def attention(self) -> SelfAttention | LatentAttention: ...

    def __call__(
        self, x: Tensor, residual: Tensor | None, angles: Angles, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]: ...


class DecoderBlock(Layer):
    """norm, attention, add, norm, MLP or experts: the Llama arrangement."""

    def __init__(
        self,
        attention: SelfAttention | LatentAttention,
        mlp: MLP | SparseMoE,
        input_norm: RMSNorm,
        post_norm: RMSNorm,
        *,
        rotary: int = 0,
    ) -> None:
        self.attention = attention
        self.mlp = mlp
        self.input_norm = input_norm
        self.post_norm = post_norm
        self.rotary = rotary

    def __call__(
        self, x: Tensor, residual: Tensor | None, angles: Angles, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """x [T, hidden] and the residual so far -> the block's branch output and the new residual."""
        if residual is None:
            x, residual = self.input_norm(x), x
        else:
            x, residual = self.input_norm.add(x, residual)
        x = self.attention(x, angles[self.rotary], batch)
        x, residual = self.post_norm.add(x, residual)
        return self.mlp(x), residual


class Decoder(Layer):
    """A causal language model (`plugins.model.CausalLM`)."""

    def __init__(
        self,
        *,
        embedding: Embedding,
        blocks: Sequence[Block],
        norm: RMSNorm,
        head: LMHead,
        rotaries: Sequence[Rotary],
        table: WeightTable,
        logit_softcap: float | None = None,
    ) -> None:
        self.embedding = embedding
        self.blocks = list(blocks)
        self.norm = norm
        self.head = head
        self.rotaries = list(rotaries)
        self.table = table
        self.logit_softcap = logit_softcap
        self.hidden_taps: Mapping[int, Tensor] = {}

    def forward(self, batch: ForwardBatch) -> Tensor:
        """-> final hidden states [T, hidden], normed."""
        x = self.embedding(batch.token_ids)
        angles = tuple([rotary(batch.positions) for rotary in self.rotaries])
        residual: Tensor | None = None
        for layer_id, block in enumerate(self.blocks):
            x, residual = block(x, residual, angles, batch)
            if layer_id in self.hidden_taps:
                torch.add(x, residual, out=self.hidden_taps[layer_id][: x.shape[0]])
        return self.norm(x) if residual is None else self.norm.add(x, residual)[0]

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """(hidden [T, hidden], rows [M] int64) -> fp32 [M, vocab]."""
        logits = self.head(self.head.ops.gather_rows(hidden, rows))
        if self.logit_softcap is not None:
            tanh = self.head.ops.tanh or Tensor.tanh_
            logits = tanh(logits.div_(self.logit_softcap)).mul_(self.logit_softcap)
        return logits

    def kv_layout(self) -> KVLayout:
        return kv_layout([block.attention.facts for block in self.blocks])

    def weight_table(self) -> WeightTable:
        return self.table

    def routed_layers(self) -> tuple[RoutedLayer, ...]:
        """The layers with experts, lowest first; none in a dense model."""
        return tuple(layer.routed for layer in self._sparse())

    def set_route_taps(self, taps: Mapping[int, Tensor]) -> None:
        """From the next forward pass on, the routers of these layers write their choice into these buffers
        [max tokens of a step, K]; all others write nothing. The buffers are the caller's."""
        for layer in self._sparse():
            layer.route_tap = taps.get(layer.routed.layer_id)

    def unbound_layers(self) -> tuple[int, ...]:
        """Blocks whose feed-forward part is of a foreign kind: nobody knows whether it routes."""
        parts = [getattr(block, "mlp", None) for block in self.blocks]
        return tuple(i for i, part in enumerate(parts) if not isinstance(part, MLP | SparseMoE))

    def hidden_shape(self) -> tuple[int, int]:
        """(decoder layers, hidden size)."""
        return len(self.blocks), self.embedding.weight.shape[1]

    def set_hidden_taps(self, taps: Mapping[int, Tensor]) -> None:
        """From the next forward pass on, the sum of branch and residual stream behind these layers is written into these
        buffers [max tokens of a step, hidden]. The buffers are the caller's."""
        self.hidden_taps = dict(taps)

    def _sparse(self) -> list[SparseMoE]:
        parts = [getattr(block, "mlp", None) for block in self.blocks]
        return [part for part in parts if isinstance(part, SparseMoE)]
