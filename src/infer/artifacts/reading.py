"""What every reader of an artifact offers, whatever the format of the bytes. Synchronous, for trainers and tools."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from infer.artifacts.generation import GenerationArtifact, RoutedExperts, SelectedLogprobs
from infer.artifacts.record import FieldRows, ParentReference, Provenance, WeightSpan
from infer.errors import ArtifactCorruptError, ArtifactError


@dataclass(frozen=True, slots=True)
class Verified:
    """What was found to hold of the whole object."""

    actual_bytes: int
    sha256: str
    body_sha256: str


@dataclass(frozen=True, slots=True)
class ChoiceSummary:
    """What the manifest says of a choice."""

    choice_index: int
    prompt_token_count: int
    num_tokens: int
    contents: tuple[str, ...]
    route_start: int | None
    routes_shape: tuple[int, ...] | None
    routes_dtype: str | None
    router_ids: tuple[int, ...]
    expert_counts: tuple[int, ...]
    finish_reason: str | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class FieldSummary:
    """What the header says of the rows of one field that lie together."""

    name: str
    choices: tuple[int, ...]
    """Choices that share these rows."""
    scope: str
    """prompt_token, output_token, token (both), step or request."""
    row_start: int
    num_rows: int
    dtype: str
    shape: tuple[int, ...]
    """Of the values."""
    raw_bytes: int
    stored_bytes: int
    known: bool = True
    """False: a plugin's field, which this reader checks and hands out without judging its values."""


class ArtifactReader(ABC):
    """Made by `open_artifact`. Every method raises `ArtifactCorruptError` where the bytes do not hold up, and
    `ArtifactFieldMissingError` where the artifact does not have what is asked for. `choice` is the index of one; left out,
    the first."""

    format: str
    codec: str
    actual_bytes: int
    choices: tuple[ChoiceSummary, ...]
    provenance: Provenance | None = None
    """Where the generation came from; None in a format without it."""
    parent: ParentReference | None = None
    """The artifact whose rows this one does not repeat."""

    @abstractmethod
    def fields(self) -> tuple[FieldSummary, ...]:
        """All that is stored, fields of unknown plugins included. Reads nothing more."""

    @abstractmethod
    def field(
        self,
        name: str,
        choice: int | None = None,
        *,
        tokens: slice | None = None,
        layers: Iterable[int] | None = None,
    ) -> FieldRows:
        """Rows of one field, of some absolute positions and of some decoder layers (default: all that there are)."""

    @abstractmethod
    def tokens(self, choice: int | None = None) -> NDArray[np.int64]:
        """Prompt and completion token ids."""

    @abstractmethod
    def routes(
        self, choice: int | None = None, *, layers: Iterable[int] | None = None, tokens: slice | None = None
    ) -> RoutedExperts:
        """Routes of some decoder layers and of some absolute token positions (default: all that there are)."""

    @abstractmethod
    def logprobs(self, choice: int | None = None) -> SelectedLogprobs:
        """Log-probability of every completion token."""

    @abstractmethod
    def artifact(self) -> GenerationArtifact:
        """Token ids, routes and log-probabilities, decoded and checked."""

    @abstractmethod
    def verify(self, *, sha256: str | None = None, actual_bytes: int | None = None) -> Verified:
        """Read and check the whole object, against the receipt's digest and size where they are given."""

    def weight_spans(self, choice: int | None = None) -> tuple[WeightSpan, ...]:
        """Version of the weights of every token, as spans."""
        rows = self.field("weight_spans", choice)
        versions = rows.attributes["versions"]
        if not isinstance(versions, tuple):
            raise ArtifactCorruptError("weight_spans has no versions")
        numbers = np.asarray(rows.values)
        edges = [0, *(np.flatnonzero(np.diff(numbers.astype(np.int64))) + 1).tolist(), len(numbers)]
        return tuple(
            WeightSpan(rows.row_start + start, rows.row_start + end, str(versions[int(numbers[start])]))
            for start, end in itertools.pairwise(edges)
            if end > start
        )


def row_range(tokens: slice | None, token_start: int, rows: int) -> tuple[int, int]:
    """Row numbers of a slice of absolute positions."""
    if tokens is None:
        return 0, rows
    if not isinstance(tokens, slice) or tokens.step not in (None, 1):
        raise ArtifactError(
            f"tokens={tokens!r}: rows are read in one piece, tokens=slice(first, end); choose among the result"
        )
    first, last, _ = tokens.indices(token_start + rows)
    first = max(first, token_start) - token_start
    return first, max(first, last - token_start)


def sound(check: Callable[[], None]) -> None:
    """A check of values that were read: what fails it is damaged, not badly asked for."""
    try:
        check()
    except ArtifactError as error:
        raise ArtifactCorruptError(str(error)) from None
