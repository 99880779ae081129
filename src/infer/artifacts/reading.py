"""What every reader of an artifact offers, whatever the format of the bytes. Synchronous, for trainers and tools."""

from __future__ import annotations

import itertools
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from infer.artifacts.byte_source import ByteSource, ClosedSource
from infer.artifacts.generation import GenerationArtifact, RoutedExperts, SelectedLogprobs
from infer.artifacts.record import FieldRows, ParentReference, Provenance, WeightSpan
from infer.errors import ArtifactCorruptError, ArtifactError, ArtifactFieldMissingError

_SHOWN = 4
"""Choices in a repr."""


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
    `ArtifactFieldMissingError` where the artifact does not have what is asked for. `choice` is the index of one, and may be
    left out where there is only one; `layers` are decoder layers, one or several. Use it in a `with`, or `close` it, to let go
    of what it read; arrays that it handed out stay."""

    format: str
    codec: str
    actual_bytes: int
    choices: tuple[ChoiceSummary, ...]
    provenance: Provenance | None = None
    """Where the generation came from; None in a format without it."""
    parent: ParentReference | None = None
    """The artifact whose rows this one does not repeat."""
    _source: ByteSource

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        held = "; ".join(
            f"choice {one.choice_index}: {one.prompt_token_count} + {one.num_tokens - one.prompt_token_count} tokens"
            + "".join(f", {name}" for name in one.contents)
            for one in self.choices[:_SHOWN]
        )
        more = f"; {len(self.choices) - _SHOWN} more" if len(self.choices) > _SHOWN else ""
        return f"<{type(self).__name__} {self.format}, {self.codec}, {self.actual_bytes} bytes; {held}{more}>"

    def close(self) -> None:
        """What was read is forgotten, and nothing is read any more; what the header says stays. A parent stays open."""
        self._source = ClosedSource(self.actual_bytes)

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
        layers: int | Iterable[int] | None = None,
    ) -> FieldRows:
        """Rows of one field, of some absolute positions and of some decoder layers (default: all that there are)."""

    @abstractmethod
    def tokens(self, choice: int | None = None) -> NDArray[np.int64]:
        """Prompt and completion token ids."""

    @abstractmethod
    def routes(
        self, choice: int | None = None, *, layers: int | Iterable[int] | None = None, tokens: slice | None = None
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

    def _chosen(self, choice: int | None) -> int:
        """The index that is meant. Raises `ArtifactFieldMissingError`."""
        known = [one.choice_index for one in self.choices]
        if choice is None:
            if len(known) == 1:
                return known[0]
            raise ArtifactFieldMissingError(f"there are choices {known[:64]}: say which one, such as choice={known[0]}")
        if choice not in known:
            raise ArtifactFieldMissingError(f"there is no choice {choice!r}; there are {known[:64]}")
        return choice


def chosen_layers(layers: object) -> tuple[int, ...] | None:
    """One layer or several, as they were asked for. Raises `ArtifactError`."""
    if layers is None:
        return None
    try:
        if isinstance(layers, str | bytes):
            raise TypeError
        given: Iterable[Any] = layers if isinstance(layers, Iterable) else (layers,)
        return tuple(operator.index(layer) for layer in given)
    except TypeError:
        raise ArtifactError(
            f"layers={layers!r}: give a decoder layer, such as layers=1, or several, layers=[1, 3]"
        ) from None


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
