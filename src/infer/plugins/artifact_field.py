"""Contract of an artifact field (hook `infer_artifact_fields`): one per-token fact carried by a generation artifact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

API_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactFieldSpec:
    name: str
    api: int
    factory: str
    """"module:attr", called as `factory(config: ModelConfig) -> ArtifactField`."""
    dtype: str
    coordinate: Literal["executed_token", "predicted_token", "sampling_step", "request"]
    reuse: Literal["prefix_block", "request_only"]
    tap: str
    """Name of the auxiliary output it reads."""
    encoding: str
    example: dict[str, Any]


class ArtifactField(Protocol):
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row, from the model's facts."""
        ...

    def select(self, tap: Tensor, rows: Tensor) -> Tensor:
        """On the device: the rows to keep, narrowed to the field's dtype."""
        ...

    def encode(self, rows: bytes, count: int) -> bytes: ...

    def decode(self, data: bytes, count: int) -> bytes: ...
