"""Contract of a weight quantization method (hook `infer_quant_methods`): how a linear layer stores and applies its weight,
or how plain weights become blocks while they are loaded. Called on the worker thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from infer.plugins.platform import Ops

API_VERSION = 1
PLAIN_WEIGHTS = "infer.quantization.unquantized:create"
"""Factory of a method whose reader does all: layers hold plain numbers, or the blocks that the reader's quants fit."""
WeightRole = Literal["linear", "experts", "vocabulary"]
"""What a weight that may be quantised is for: a linear layer, the experts of a sparse block, or the embedding and the head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantMethodSpec:
    name: str
    api: int
    factory: str
    """"module:attr", called as `factory(section: dict | None) -> QuantMethod`; of a method with `at_load` as
    `factory(None) -> LoadTimeMethod`."""
    matches: str
    """"module:attr", called with the checkpoint's quantization section (or None), returns bool; of a method with `at_load`
    always False: it is chosen by its name in model.quantization."""
    dtypes: tuple[str, ...]
    """Activation dtypes it works with."""
    example: dict[str, Any]
    """{"section": ..., "shape": [N, I], "tolerance": largest error of dequantize against the original, relative to the largest
    weight, "encode": "module:attr"}: from an original float32 [N, I] to the tensors of a checkpoint, by the names of `create`;
    not needed where the storage is one floating-point "weight". With a reader also "stored": "module:attr", called with the name
    and the original of a weight, gives the tensors of a checkpoint that hold it; without it the kit sees little of the reader.
    "tolerance" is then also what storing may cost. With `at_load`
    "tolerance" bounds the relative root-mean-square error of normally distributed weights, for the coarsest role."""
    reader: str | None = None
    """"module:attr", called as `reader(section) -> plugins.checkpoint_format.CheckpointFormat`: how such a checkpoint stores its
    weights. The engine makes blocks or plain weights of them, and the method's own storage holds the plain ones. Raises
    `UnsupportedModelError` for variants it does not read. None: the method's storage is what the checkpoint stores."""
    at_load: bool = False
    """It makes blocks of the plain weights of any checkpoint while they are loaded."""


class QuantMethod(Protocol):
    """Owns the storage of linear weights. `storage` is a plain dict of tensors kept by the layer."""

    name: str

    def create(
        self, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device
    ) -> dict[str, Tensor]:
        """Uninitialised storage for a weight [out_features, in_features]."""
        ...

    def finalize(self, storage: dict[str, Tensor], ops: Ops) -> dict[str, Tensor]:
        """After all rows are loaded: pack for the platform. May return new tensors; the old ones are dropped."""
        ...

    def apply(self, storage: dict[str, Tensor], x: Tensor, bias: Tensor | None, ops: Ops) -> Tensor:
        """x [T, in] -> [T, out]."""
        ...

    def dequantize(self, storage: dict[str, Tensor]) -> Tensor:
        """-> [out, in] in floating point; the oracle of `apply`."""
        ...


class LoadTimeMethod(Protocol):
    """Turns plain weights into blocks as GGML stores them, one piece of a tensor at a time."""

    name: str

    def block_type(self, role: WeightRole) -> str | None:
        """GGML's name of the block type that weights of this role become ("Q8_0"); None: they stay plain."""
        ...

    def encode(self, rows: Tensor, block_type: str) -> Tensor:
        """rows [n, I] in floating point, I a multiple of the block -> uint8 [n, bytes of a row], in GGML's layout. Every row
        by itself: how a tensor is cut does not change its blocks. Raises `WeightError` for numbers that are not finite."""
        ...


@runtime_checkable
class SupportsPlatformEncoders(Protocol):
    """A `LoadTimeMethod` whose rounding a platform may know, and do faster (`plugins.platform.BlockOps.encoders`)."""

    def rounding(self, block_type: str) -> str:
        """Name of what `encode` does. A platform's encoder of that name makes the same bytes of all numbers that `encode`
        takes, and refuses the others."""
        ...
