"""Contract of an output parser (hook `infer_parsers`): model text to reasoning, tool calls and plain text, streamed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

API_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserSpec:
    name: str
    api: int
    factory: str
    """"module:attr", called as `factory(tools: list[dict]) -> Parser`, once per choice."""
    fingerprints: tuple[str, ...]
    """Substrings of chat templates that this format belongs to."""
    example: dict[str, Any]
    """{"transcripts": [{"text": ..., "events": [...]}]}."""


@dataclass(frozen=True, slots=True)
class ParserEvent:
    kind: Literal["text", "reasoning", "tool_start", "tool_args", "tool_end"]
    text: str = ""
    """The piece; for tool_start the function name."""
    call_index: int = 0


class Parser(Protocol):
    """Never raises on model output; the concatenation of events loses no text."""

    def feed(self, text: str, token_ids: Sequence[int]) -> list[ParserEvent]: ...

    def finish(self) -> list[ParserEvent]: ...
