"""What the operator asks of constrained output: which backend, and what a grammar may cost. Frozen; parsed once, at start."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from infer.config.units import parse_bytes


class StructuredOutputSection(BaseModel):
    """Nothing is loaded before the first request that asks for it."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    backend: str = "auto"
    """Grammar plugin; auto takes the available one with the highest priority."""
    reasoning_parser: str = "auto"
    """Output parser whose reasoning marks a grammar waits for and thinking_budget closes; auto: by the chat template; none:
    the model does not reason."""
    skip_forced_tokens: bool = True
    """Compute a token that a grammar or thinking_budget leaves no choice about together with the one before it, instead of in
    a step of its own. Tokens and log-probabilities are the same."""
    compile_timeout: Annotated[float, Field(gt=0, le=600)] = 10.0
    """Seconds a grammar may take to compile; then its request is refused."""
    max_source_bytes: Annotated[int, Field(ge=64, le=2**26), BeforeValidator(parse_bytes)] = 2**20
    """Largest schema or grammar."""
    cache_size: Annotated[int, Field(ge=1, le=65536)] = 64
    """Compiled grammars kept for the next request; together they have at most eight times max_source_bytes of source."""
