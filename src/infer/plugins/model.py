"""Contract of a model architecture (hook `infer_models`).

The spec is plain data; the object is built on the worker thread, first on the meta device for planning.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor

    from infer.config.model import KVLayout, RoutedLayer
    from infer.plugins.platform import AttentionMetadata, Ops
    from infer.plugins.quant_method import QuantMethod
    from infer.weights.mapping import WeightTable

API_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """An architecture. `architectures` are the names in `config.json`."""

    name: str
    api: int
    factory: str
    """"module:attr", called as `factory(config: ModelConfig, context: BuildContext) -> CausalLM`."""
    architectures: tuple[str, ...]
    capabilities: frozenset[str] = frozenset({"generate"})
    config_view: str
    """"module:attr", called with `ModelConfig`, returns the model's own typed config; raises `ModelError` on bad facts."""
    gguf: GGUFNames | None = None
    """How a GGUF of this architecture names things, if it can be loaded from one."""
    example: dict[str, Any]
    """A two-layer `config.json` that the conformance kit builds with random weights and checks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFNames:
    """Translation from GGUF to the Hugging Face checkpoint this architecture is described in."""

    arch: str
    """`general.architecture` in the file."""
    architecture: str
    """The `config.json` architecture it stands for."""
    config_keys: dict[str, str]
    """config.json key -> GGUF key after the architecture prefix, e.g. "hidden_size": "embedding_length"."""
    tensors: dict[str, str]
    """GGUF tensor name -> HF name; "{i}" stands for the layer number in both, "{e}" in the HF name for the expert number:
    the GGUF tensor then stacks all experts."""
    permuted: dict[str, str] = field(default_factory=dict)
    """HF suffix -> config key of its head count, for q/k rows that llama.cpp interleaves for rotary."""
    norm_offset: float = 0.0
    """Subtracted from norm weights on load (llama.cpp stores Gemma's 1 + w)."""
    fixed: dict[str, Any] = field(default_factory=dict)
    """config.json values that the GGUF does not carry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """What a model needs to build its layers."""

    ops: Ops
    dtype: torch.dtype
    device: torch.device
    quant: QuantMethod


@dataclass(slots=True)
class ForwardBatch:
    """Input of one forward pass: T tokens of R rows, flat."""

    token_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64, absolute."""
    attention: tuple[AttentionMetadata, ...]
    """One per KV group, in the layout's order."""
    kv: dict[int, tuple[Tensor, Tensor]]
    """layer id -> (k_cache, v_cache)."""
    group_of_layer: dict[int, int]


class CausalLM(Protocol):
    """A decoder that predicts the next token. Parameters are `layers.Parameter` slots filled through the weight table."""

    def forward(self, batch: ForwardBatch) -> Tensor:
        """-> final hidden states [T, hidden], normed."""
        ...

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """(hidden [T, hidden], rows [M] int64) -> float32 [M, vocab]."""
        ...

    def kv_layout(self) -> KVLayout: ...

    def weight_table(self) -> WeightTable:
        """Every checkpoint tensor's destination; checked for exact coverage by the loader."""
        ...


@runtime_checkable
class SupportsRouteTaps(Protocol):
    """A model whose routers can be read. One that is not cannot serve requests for routed experts."""

    def routed_layers(self) -> tuple[RoutedLayer, ...]:
        """The layers whose routers can be tapped, lowest first; none in a dense model."""
        ...

    def unbound_layers(self) -> tuple[int, ...]:
        """Layers that may route tokens by other means than a router of `routed_layers`."""
        ...

    def set_route_taps(self, taps: Mapping[int, Tensor]) -> None:
        """layer id -> a buffer [max tokens of a step, K], any integer dtype. From the next forward pass on, every token's
        choice is written to the buffer's first rows, in the router's order; layers that are not named write nothing."""
        ...


@runtime_checkable
class SupportsHiddenTaps(Protocol):
    """A model whose layers' outputs can be read."""

    def hidden_shape(self) -> tuple[int, int]:
        """(decoder layers, hidden size)."""
        ...

    def set_hidden_taps(self, taps: Mapping[int, Tensor]) -> None:
        """layer id -> a buffer [max tokens of a step, hidden size], compute dtype, for the residual stream behind the
        layer. As `SupportsRouteTaps.set_route_taps`."""
        ...
