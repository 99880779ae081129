"""Contract of how a checkpoint stores weights that were quantised before (`QuantMethodSpec.reader`): which tensors make up
a weight, and the numbers in them. The engine turns these into blocks that kernels multiply with, or into plain weights.

Called on the worker thread while a model is planned and loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from infer.errors import UnsupportedModelError, WeightError

if TYPE_CHECKING:
    from torch import Tensor


MATRIX = 2


class StoredTensor(Protocol):
    """What a header says of a tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def stored_dtype(self) -> str:
        """As safetensors writes it: "I32", "F16", "F8_E4M3", ..."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeight:
    """A quantised weight under the name that a plain checkpoint would give it."""

    shape: tuple[int, int]
    """[N, I]: output and input features."""
    sources: Mapping[str, str]
    """Part, in words of the format, -> tensor that holds it."""
    unused: tuple[str, ...] = ()
    """Tensors that belong to it and are not needed here, for example scales of activations."""
    group_size: int = 0
    """Input features that share a scale; 0: the weight is no `GroupedRows`, or its columns are in another order."""
    levels: int = 0
    """Different values of a quant: 16 or 256; 0 as above."""
    zero: int | None = None
    """The quant that stands for 0 in every group; None: each group has its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedRows:
    """Some rows of a weight: weight[n, i] = scales[n, g] * (quants[n, i] - zeros[n, g]), g = groups[i] or i // group size."""

    quants: Tensor
    """uint8 [n, I]."""
    scales: Tensor
    """fp32 [n, G]."""
    zeros: Tensor
    """fp32 [n, G]."""
    groups: Tensor | None = None
    """int64 [I]: the group of each column; None: neighbours, as many as `StoredWeight.group_size`."""


class CheckpointFormat(Protocol):
    """One section's way to store weights. Made by `QuantMethodSpec.reader`, which refuses variants that it does not know."""

    def weights(self, tensors: Mapping[str, StoredTensor]) -> Mapping[str, StoredWeight]:
        """Every quantised weight among the tensors, by the name of the plain weight ("model.layers.0.mlp.up_proj.weight").
        Raises `WeightError` naming a tensor whose shape or dtype does not fit the section, or that is missing."""
        ...

    def rows(self, weight: StoredWeight, parts: Mapping[str, Tensor], start: int, stop: int) -> GroupedRows | Tensor:
        """Rows start .. stop: as quants, or as numbers fp32 [n, I]. `parts` are the sources as stored. Raises `WeightError`."""
        ...


def check_matrix(name: str, stored: StoredTensor) -> None:
    """Raises `WeightError` unless a tensor has rows and columns."""
    if len(stored.shape) != MATRIX or 0 in stored.shape:
        raise WeightError(f"tensor {name!r} of a quantised weight has the shape {tuple(stored.shape)}", tensor=name)


def check_tensor(
    tensors: Mapping[str, StoredTensor],
    name: str,
    shape: tuple[int, ...],
    dtypes: tuple[str, ...],
    *others: tuple[int, ...],
) -> None:
    """Raises `WeightError` unless the tensor is there, in one of the dtypes and the shape, or one of the `others`."""
    stored = tensors.get(name)
    if stored is None:
        raise WeightError(f"the checkpoint lacks tensor {name!r} of a quantised weight", tensor=name)
    if tuple(stored.shape) not in (shape, *others) or stored.stored_dtype not in dtypes:
        raise WeightError(
            f"tensor {name!r} is {stored.stored_dtype} {tuple(stored.shape)}; its section calls for {dtypes[0]} {shape}",
            tensor=name,
        )


def check_group_size(method: str, value: object) -> int:
    """The group size of a section: a number, or -1 for all columns. Raises `UnsupportedModelError`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < -1 or value == 0:
        raise UnsupportedModelError(
            f"{method} with group_size={value!r} is not supported; it is a number, or -1 for all"
        )
    return value


def check_parts(
    tensors: Mapping[str, StoredTensor], prefix: str, parts: Mapping[str, tuple[tuple[int, ...], tuple[str, ...]]]
) -> dict[str, str]:
    """Part -> the name of its tensor. `parts`: shape and dtypes of each. Raises `WeightError` as `check_tensor` does."""
    for part, (shape, dtypes) in parts.items():
        check_tensor(tensors, f"{prefix}.{part}", shape, dtypes)
    return {part: f"{prefix}.{part}" for part in parts}
