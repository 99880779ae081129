"""The gated feed-forward part of a decoder block. Called on the worker thread; owns its two linear layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from torch import Tensor

from infer.layers.linear import Linear
from infer.layers.parameter import Layer

if TYPE_CHECKING:
    from infer.plugins.model import BuildContext

Activation = Literal["silu", "gelu_tanh"]


class MLP(Layer):
    """down(act(gate x) * up x), gate and up as one weight (gate rows first)."""

    def __init__(
        self,
        context: BuildContext,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Activation = "silu",
        bias: bool = False,
    ) -> None:
        self.gate_up = Linear(context, hidden_size, 2 * intermediate_size, bias=bias)
        self.down = Linear(context, intermediate_size, hidden_size, bias=bias)
        self.activate = context.ops.silu_and_mul if activation == "silu" else context.ops.gelu_tanh_and_mul

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        return self.down(self.activate(self.gate_up(x)))
