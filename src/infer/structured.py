"""What a request may ask of the form of its output: a JSON schema, a regex, a choice, a grammar or structural tags.

Plain frozen data, part of `SamplingParams`; compiled by `engine.structured`.
"""

from __future__ import annotations

import json
from typing import Annotated, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

KINDS = ("json_schema", "json_object", "regex", "choice", "grammar", "structural_tag")
"""Fields of `StructuredOutput` of which exactly one is given."""
MAX_CHOICES = 100_000


def _as_json(value: object) -> object:
    """A schema or tag as JSON text: given as text, as parsed JSON, or as a pydantic model."""
    if isinstance(value, type) and issubclass(value, BaseModel):
        value = value.model_json_schema()
    if isinstance(value, str | None):
        return value
    if not isinstance(value, dict | bool):
        raise ValueError(f"is {type(value).__name__}, not a JSON object")
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from None


class StructuredOutput(BaseModel):
    """Exactly one of the first six fields says what the output must be; the others are about JSON alone.

    `SamplingParams(structured_output={"regex": "[0-9]+"})` makes one, too.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    json_schema: Annotated[str | None, BeforeValidator(_as_json)] = None
    """A JSON schema: an object, its text, or a pydantic model. Properties come in the schema's order."""
    json_object: bool = False
    """Any JSON object."""
    regex: Annotated[str, Field(min_length=1)] | None = None
    """The whole output matches this expression: no look-around, no back-references; \\d, \\w and \\s are ASCII."""
    choice: Annotated[tuple[str, ...], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)] | None = None
    """The output is one of these texts."""
    grammar: Annotated[str, Field(min_length=1)] | None = None
    """A context-free grammar: Lark (begins at rule `start`) or EBNF as llama.cpp writes it (begins at `root`)."""
    structural_tag: Annotated[str | None, BeforeValidator(_as_json)] = None
    """Free text with constrained parts behind triggers, in xgrammar's JSON format."""
    compact: bool = False
    """JSON without white space between tokens."""
    whitespace_pattern: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Regex of the white space that JSON may have between tokens; the default is up to 128 characters."""
    forbid_additional_properties: bool = False
    """Objects of the schema that list their properties and do not say otherwise have no others."""

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            what = f"both {' and '.join(given)}" if given else "none"
            raise ValueError(f"give exactly one of {', '.join(KINDS)}, not {what}")
        about_json = self.json_schema is not None or self.json_object
        for name in ("compact", "whitespace_pattern", "forbid_additional_properties"):
            if getattr(self, name) and not about_json:
                raise ValueError(f"{name} is about JSON, and {given[0]} is given")
        if self.compact and self.whitespace_pattern is not None:
            raise ValueError("compact and whitespace_pattern contradict each other; give one of them")
        return self

    @property
    def kind(self) -> str:
        """The one of `KINDS` that is given."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))
