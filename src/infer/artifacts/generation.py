"""A generation as a trainer sees it: token ids, routed experts, log-probabilities, aligned row by row.

Plain frozen values over numpy arrays, shared by the codec, the reader and the exporters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

IntegerArray = NDArray[Any] | Sequence[Any]
"""An integer array, or nested sequences of integers."""


@dataclass(frozen=True, slots=True, eq=False)
class RoutedExperts:
    """Experts that the router chose, for every token that was fed to the model.

    Row i of `expert_ids` [rows, routers, experts per token] belongs to token `token_start + i`. The last token of a
    sequence was never fed and has no row. The order of the experts is the router's own.
    """

    token_start: int
    expert_ids: IntegerArray
    router_ids: Sequence[int]
    """0-based decoder layer of each router."""
    expert_counts: Sequence[int]
    """Experts of each router."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RoutedExperts):
            return NotImplemented
        return (
            self.token_start == other.token_start
            and _same(self.expert_ids, other.expert_ids)
            and tuple(self.router_ids) == tuple(other.router_ids)
            and tuple(self.expert_counts) == tuple(other.expert_counts)
        )

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True, eq=False)
class SelectedLogprobs:
    """Natural log-probability of each completion token; `token_start` is the prompt's length."""

    token_start: int
    logprobs: NDArray[Any] | Sequence[float]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SelectedLogprobs):
            return NotImplemented
        mine, theirs = (np.asarray(value, dtype=np.float32) for value in (self.logprobs, other.logprobs))
        return self.token_start == other.token_start and mine.tobytes() == theirs.tobytes()

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True, eq=False)
class ArtifactChoice:
    """One answer: the prompt's and the answer's token ids, and what was recorded beside them."""

    choice_index: int
    prompt_token_count: int
    sequence_token_ids: IntegerArray
    moe_routes: RoutedExperts | None = None
    selected_logprobs: SelectedLogprobs | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ArtifactChoice):
            return NotImplemented
        return (
            self.choice_index == other.choice_index
            and self.prompt_token_count == other.prompt_token_count
            and _same(self.sequence_token_ids, other.sequence_token_ids)
            and self.moe_routes == other.moe_routes
            and self.selected_logprobs == other.selected_logprobs
        )

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class GenerationArtifact:
    """Everything that one request delivers, choices in order."""

    choices: Sequence[ArtifactChoice]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GenerationArtifact):
            return NotImplemented
        return list(self.choices) == list(other.choices)

    __hash__ = None  # type: ignore[assignment]


def _same(left: IntegerArray, right: IntegerArray) -> bool:
    return bool(np.array_equal(np.asarray(left), np.asarray(right)))
