"""Contract of an artifact field (hook `infer_artifact_fields`): one per-token fact that the engine captures.

The spec is plain data; the object is made on the worker thread and called there once per step and at start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from infer.config.capture import CaptureProfile
from infer.config.model import RoutedLayer
from infer.errors import ArtifactCorruptError

if TYPE_CHECKING:
    from torch import Tensor

API_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactFieldSpec:
    name: str
    api: int
    factory: str
    """"module:attr", called as `factory(facts: TapFacts) -> ArtifactField`. Raises `ConfigError` for a model that cannot
    give the field."""
    coordinate: Literal["executed_token", "predicted_token", "sampling_step", "request"]
    """What a row belongs to. The engine captures a row for every executed token: one that was input to a forward pass. With
    "predicted_token" (tap "logits") that row belongs to the position behind it, which the token's logits predict."""
    reuse: Literal["prefix_block", "request_only"]
    """prefix_block: rows are kept with the KV blocks of the prefix cache, so they depend on the tokens before alone."""
    tap: Literal["router", "hidden", "logits", "sampled"]
    """Name of the auxiliary output it reads; "sampled" is reserved."""
    encoding: str
    """Name of the encoding of its rows in an artifact."""
    example: dict[str, Any]
    """Arguments of `TapFacts` under the conformance kit; routed_layers as (layer_id, num_experts, top_k)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TapFacts:
    """What a model offers to be tapped."""

    model_identity: str
    dtype: str
    """Compute dtype, such as "bfloat16"."""
    num_layers: int
    """Decoder layers, whatever their kind; 0 when the model does not say."""
    hidden_size: int
    """0 when the model does not say."""
    routed_layers: tuple[RoutedLayer, ...]
    """Lowest first; the order of the router tap's first axis."""
    hidden_layers: tuple[int, ...]
    """Layers chosen by the operator, ascending; the order of the hidden tap's first axis."""
    vocab_size: int = 0
    """Width of the logits tap."""


class ArtifactField(Protocol):
    def profile(self) -> CaptureProfile:
        """What a row is; its name is the spec's. Fixed by the model, never by the values."""
        ...

    def select(self, tap: Tensor, tokens: Tensor, out: Tensor) -> None:
        """On the device, without waiting for it: rows `tokens` [n] int64 of the step, in that order, into `out`
        [n, *row_shape], which has the profile's dtype. Taps: "router" [routed layers, step tokens, K], a signed integer
        type; "hidden" [hidden layers, step tokens, hidden size], the compute dtype; "logits" [1, some tokens, vocabulary],
        float32, in pieces: called for one piece of the step's captured tokens after another."""
        ...

    def encode(self, rows: bytes, count: int) -> bytes:
        """`count` rows in C order -> their form in an artifact."""
        ...

    def decode(self, data: bytes, count: int) -> bytes:
        """The rows back. Raises `ArtifactCorruptError` for data that is not `count` rows."""
        ...


def whole_rows(profile: CaptureProfile, data: bytes, count: int) -> bytes:
    """`data`, when it is `count` rows of the profile. Raises `ArtifactCorruptError`."""
    if len(data) != count * profile.row_bytes:
        raise ArtifactCorruptError(
            f"{profile.name}: {count} rows take {count * profile.row_bytes} bytes, there are {len(data)}"
        )
    return data
