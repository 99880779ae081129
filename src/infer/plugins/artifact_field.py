"""Contract of an artifact field (hook `infer_artifact_fields`): one per-token fact that the engine captures.

The spec is plain data; the object is made on the worker thread and called there once per step and at start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from infer.config.capture import FIELD_NAME, ITEM_SIZES, LAYERED, MOE_ROUTES, CaptureProfile, artifact_name
from infer.config.model import RoutedLayer
from infer.errors import ArtifactCorruptError

if TYPE_CHECKING:
    from torch import Tensor

API_VERSION = 1
LAYERED_RANK = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactFieldSpec:
    name: str
    """Artifacts call it `distribution.name`, but for the names in `infer.config.capture.LAYERED`. Lower-case letters, digits,
    hyphens and underscores."""
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


def profile_problem(spec: ArtifactFieldSpec, profile: CaptureProfile, distribution: str) -> str:
    """Why rows of this profile cannot be captured, or no artifact could carry them; "" when they can."""
    called = artifact_name(spec.name, distribution)
    rows = f"rows of shape {profile.row_shape}"
    if profile.name != spec.name:
        return f"its profile has the name {profile.name!r}; that must be the field's"
    if profile.dtype not in ITEM_SIZES or profile.row_bytes < 1:
        return (
            f"its profile has {rows} of dtype {profile.dtype!r}; rows have a cell or more, of {', '.join(ITEM_SIZES)}"
        )
    if not FIELD_NAME.fullmatch(called):
        return (
            f"artifacts cannot have a field called {called!r}; a field's name has at most 64 lower-case letters, digits, "
            "hyphens and underscores, a letter first, and its distribution's at most 64"
        )
    if profile.layer_ids and profile.row_shape[:1] != (len(profile.layer_ids),):
        return f"its profile names {len(profile.layer_ids)} layers, and {rows} have another first axis"
    dtypes = LAYERED.get(spec.name)
    if dtypes is not None and not (
        profile.dtype in dtypes
        and len(profile.row_shape) == LAYERED_RANK
        and profile.layer_ids
        and spec.coordinate == "executed_token"
        and (profile.num_experts > 0) == (spec.name == MOE_ROUTES)
    ):
        return (
            f"artifacts know a field of this name: per executed token a row [layers, width] of {' or '.join(dtypes)} with "
            f"layer_ids{' and num_experts' if spec.name == MOE_ROUTES else ''}. This one has {rows} of {profile.dtype} per "
            f"{spec.coordinate}; give it another name"
        )
    return ""


def whole_rows(profile: CaptureProfile, data: bytes, count: int) -> bytes:
    """`data`, when it is `count` rows of the profile. Raises `ArtifactCorruptError`."""
    if len(data) != count * profile.row_bytes:
        raise ArtifactCorruptError(
            f"{profile.name}: {count} rows take {count * profile.row_bytes} bytes, there are {len(data)}"
        )
    return data
