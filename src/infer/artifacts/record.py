"""Everything that a generation can carry, as the engine captured it: named fields of rows, and where it came from.

Plain frozen values over numpy arrays; loads no numpy. Filled by capture, written by `v2.writer`, handed out by every reader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec

from infer.types import FinishReason

if TYPE_CHECKING:  # admission imports this module, and loads no numpy
    from numpy.typing import NDArray

Scalar = bool | int | float | str
Attribute = bool | int | float | str | tuple[int | str, ...]
SamplingValue = bool | int | float | str | tuple[Scalar, ...] | dict[str, Scalar]
Axis = Literal["token", "step", "request"]
"""What a row belongs to: a position of the sequence, a sampling step, or the request as a whole."""
CAPTURED, CACHED, RECOMPUTED, MISSING = range(4)
"""Row status: computed by this request, read from the store because its KV was reused, computed again after preemption or
loss, not available (then the row is zero)."""
FINISH_REASONS: tuple[str, ...] = get_args(FinishReason)


class Numerics(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How the numbers were computed; unknown entries are empty."""

    mode: Literal["", "invariant", "fast"] = ""
    platform: str = ""
    """Which kernels: a platform by its name."""
    kernel_fingerprint: str = ""
    compute_dtype: str = ""
    weights_dtype: str = ""
    kv_dtype: str = ""
    router_dtype: str = ""
    head_dtype: str = ""


class Provenance(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where a generation came from; unknown entries are empty. No time of day: equal facts have equal bytes."""

    model: str = ""
    weights_digest: str = ""
    tokenizer_digest: str = ""
    template_digest: str = ""
    engine_version: str = ""
    logprobs_mode: str = ""
    numerics: Numerics = Numerics()
    sampling: dict[str, SamplingValue] = msgspec.field(default_factory=dict)
    """Resolved sampling parameters by the names of `SamplingParams`; what is None there is left out here."""


class ParentReference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The artifact of the turn before, whose rows a delta does not repeat."""

    choice_index: int
    """Choice of the parent that was continued."""
    fields: tuple[str, ...]
    """Fields whose earlier rows are left to the parent, sorted. The others are stored in full."""
    header_sha256: bytes
    """Of the parent's header, which holds the digests of all else: a range reader checks this one."""
    sha256: bytes
    """Of the parent's whole object, as its receipt says."""
    token_count: int
    """Leading tokens of this prompt that are the parent's."""


@dataclass(frozen=True, slots=True)
class WeightSpan:
    """Tokens `start` to `end` (exclusive, absolute) under one version of the weights: for prompt tokens the version that
    computed their KV, for output tokens the one that sampled them."""

    start: int
    end: int
    version: str


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FieldRows:
    """Consecutive rows of one field. Row i belongs to position (or step) `row_start + i`.

    Without `offsets` every array has one entry per row on its first axis. With `offsets` [rows + 1] the field is ragged:
    row i is `values[offsets[i] : offsets[i + 1]]`.
    """

    values: NDArray[Any]
    row_start: int = 0
    extra: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Further arrays beside the values, row by row: `token_ids` of topk_logprobs and prompt_logprobs."""
    offsets: NDArray[Any] | None = None
    status: NDArray[Any] | None = None
    """uint8 [rows] of CAPTURED, CACHED, RECOMPUTED, MISSING; None: all captured."""
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    axis: Axis = "token"
    executed: bool | None = None
    """True: a row tells what happened when its token was fed to the model, so the last token has none. Needed for a
    plugin's field; None: as the well-known name says."""
    bfloat16: bool = False
    """`values` are uint16 bit patterns of bfloat16."""

    @property
    def num_rows(self) -> int:
        return len(self.values) if self.offsets is None else len(self.offsets) - 1

    @property
    def row_end(self) -> int:
        return self.row_start + self.num_rows

    @property
    def complete(self) -> bool:
        """No row is missing."""
        return self.status is None or not bool((self.status == MISSING).any())

    def row(self, index: int) -> NDArray[Any]:
        """Values of row `index` (0 is the row at `row_start`)."""
        if self.offsets is None:
            found: NDArray[Any] = self.values[index]
            return found
        return self.values[int(self.offsets[index]) : int(self.offsets[index + 1])]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ChoiceRecord:
    """One answer. A field is given whole or as gapless pieces in order; it need not be cut at the end of the prompt.

    Pieces may be shared: rows that several choices have in common are stored once (equal bytes count, not identity).
    """

    choice_index: int
    prompt_token_ids: NDArray[Any] | Sequence[int]
    output_token_ids: NDArray[Any] | Sequence[int]
    fields: Mapping[str, FieldRows | Sequence[FieldRows]] = field(default_factory=dict)
    """By name, without token_ids and weight_spans."""
    weight_spans: Sequence[WeightSpan] = ()
    """Cover every token once, or are empty: not recorded."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GenerationRecord:
    """What one request delivers, choices by increasing index."""

    choices: Sequence[ChoiceRecord]
    provenance: Provenance = field(default_factory=Provenance)
    parent: ParentReference | None = None
