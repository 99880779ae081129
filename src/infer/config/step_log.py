"""What the operator asks of the step log. Frozen; parsed once, at start."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from infer.config.units import parse_bytes


class StepLogSection(BaseModel):
    """A file from which every scheduling decision can be made again, without the model. `step_log="PATH"` is short for the
    path alone."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    path: Annotated[str, Field(min_length=1)] | None = None
    """Write admissions, plans, results and evictions to this file. None: nothing is written."""
    max_bytes: Annotated[int, Field(ge=2**16), BeforeValidator(parse_bytes)] = 64 * 2**20
    """Most bytes on disk, half in the file and half in the one before it (PATH.1)."""
    token_ids: bool = False
    """Also write the token ids of prompts and outputs, which are as good as their text."""


def step_log_path(value: object) -> object:
    """`step_log="PATH"` and a whole section both."""
    return {"path": value} if isinstance(value, str) else value
