"""Sampling options that are more than one value: repetition detection, logits processors, beam search.

Plain frozen data beside `infer.types`; imports no tensor library.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_PATTERN_SIZE = 4096


class _Option(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RepetitionDetection(_Option):
    """When an answer counts as looping: it ends in `min_count` equal pieces of one length, back to back."""

    max_pattern_size: Annotated[int, Field(ge=1, le=MAX_PATTERN_SIZE, strict=True)]
    """Longest piece, in tokens."""
    min_count: Annotated[int, Field(ge=2, strict=True)]
    """Pieces in a row."""
    min_pattern_size: Annotated[int, Field(ge=1, le=MAX_PATTERN_SIZE, strict=True)] = 1
    """Shortest piece, in tokens."""

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.min_pattern_size > self.max_pattern_size:
            raise ValueError(
                f"min_pattern_size={self.min_pattern_size} is larger than max_pattern_size={self.max_pattern_size}"
            )
        return self
