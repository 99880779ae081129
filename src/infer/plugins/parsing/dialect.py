"""The tables of an output format: how reasoning is marked, which calls it writes, what else belongs to it.

Frozen plain data, built when a leaf is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from infer.plugins.parser import ReasoningImplied
from infer.plugins.parsing.calls import CallFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """See the fields of the same names on `ParserSpec`."""

    start: tuple[str, ...] = ("<think>",)
    end: tuple[str, ...] = ("</think>",)
    close: str = ""
    """"": the first of `end`."""
    implied: ReasoningImplied = "never"
    ended_by_calls: bool = True
    """A call may follow although nothing closed the reasoning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    reasoning: Reasoning | None = None
    calls: tuple[CallFormat, ...] = ()
    """Formats that share an opener are tried in this order."""
    dropped: tuple[str, ...] = ()
    """Marks that say nothing to the reader, as <|START_RESPONSE|> or the end of the turn."""
    dropped_spans: tuple[tuple[str, str], ...] = ()
    """Marks with contents, by their beginning and end, within one line."""

    def spec_fields(self) -> dict[str, Any]:
        """What a `ParserSpec` says about reasoning."""
        return reasoning_fields(self.reasoning)


def reasoning_fields(reasoning: Reasoning | None) -> dict[str, Any]:
    if reasoning is None:
        return {}
    return {
        "reasoning_start": reasoning.start,
        "reasoning_end": reasoning.end,
        "reasoning_close": reasoning.close or reasoning.end[0],
        "reasoning_implied": reasoning.implied,
    }


def starts_in_reasoning(
    start: tuple[str, ...], end: tuple[str, ...], implied: ReasoningImplied, prompt: str | None
) -> bool:
    """Whether an output after `prompt` (None: not known) begins inside reasoning."""
    tail = (prompt or "").rstrip()
    if start and tail.endswith(start):
        return True
    if end and tail.endswith(end):
        return False
    return implied == "always" or (implied == "without_prompt" and prompt is None)
