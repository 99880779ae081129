"""Sampling options that are more than one value: repetition detection, logits processors, beam search.

Plain frozen data beside `infer.types`; imports no tensor library.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

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


class NamedProcessor(_Option):
    """A logits processor that a plugin registered."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    params: dict[str, Any] = Field(default_factory=dict)
    """Its parameters; it checks them itself."""


LogitsFunction = Callable[..., Any]
"""(prompt ids, output ids so far, logits of the next token: a float32 tensor [V]) -> new logits, or None when it edited them
in place. Called on the worker thread for each token of the request: everybody waits for it."""
MAX_PROCESSORS = 16
_ONE_PROCESSOR: tuple[dict[str, Any], ...] = (
    {"type": "string", "minLength": 1, "maxLength": 200},
    {
        "type": "object",
        "properties": {"name": {"type": "string", "minLength": 1, "maxLength": 200}, "params": {"type": "object"}},
        "required": ["name"],
        "additionalProperties": False,
    },
)
PROCESSORS_SCHEMA = WithJsonSchema(
    {"anyOf": [*_ONE_PROCESSOR, {"type": "array", "items": {"anyOf": [*_ONE_PROCESSOR]}, "maxItems": MAX_PROCESSORS}]}
)
"""What JSON can say: a function of the caller's is none."""


def as_processors(value: object) -> object:
    """One processor or several, a plugin's with no parameters by its name alone."""
    if isinstance(value, str | Mapping | NamedProcessor) or callable(value):
        value = [value]
    if isinstance(value, list | tuple):
        return tuple({"name": item} if isinstance(item, str) else item for item in value)
    return value


def processor_label(processor: NamedProcessor | LogitsFunction) -> str:
    """What a record of the request says of it. A function cannot be recorded; its name can."""
    if isinstance(processor, NamedProcessor):
        return json.dumps(processor.model_dump(), sort_keys=True) if processor.params else processor.name
    return (
        f"<{getattr(processor, '__module__', '?')}.{getattr(processor, '__qualname__', type(processor).__qualname__)}>"
    )


MAX_BEAM_WIDTH = 64


class BeamSearch(_Option):
    """Keep the `width` likeliest answers at every token instead of sampling one."""

    width: Annotated[int, Field(ge=1, le=MAX_BEAM_WIDTH, strict=True)]
    length_penalty: Annotated[float, Field(ge=-10, le=10, allow_inf_nan=False)] = 1.0
    """Finished answers are compared by their log-probability / length ** length_penalty, where the length counts the prompt,
    but not a last token that ended the answer."""


BEAM_FIELDS = frozenset(
    {
        *("beam", "n", "max_tokens", "stop_token_ids", "ignore_eos", "include_stop", "skip_special_tokens", "seed"),
        *("logit_bias", "allowed_token_ids", "bad_words", "repetition_penalty", "logprobs"),
    }
)
"""Sampling parameters that mean something to beam search, or that change nothing (the seed)."""
