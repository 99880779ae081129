"""Contract of an output parser (hook `infer_parsers`): model text to reasoning, tool calls and plain text, streamed.

Runs in the request's task, without an engine; nobody but the parser owns its state. `infer.text.output_parsing` chooses one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

API_VERSION = 1

ReasoningImplied = Literal["never", "without_prompt", "always"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """One way to write calls whose arguments are JSON, so that a grammar can hold a model to it:
    section_begin, then calls joined by separator, then section_end; a call is before_name NAME before_arguments {...} end."""

    before_name: str
    before_arguments: str
    end: str
    separator: str = ""
    section_begin: str = ""
    section_end: str = ""
    trigger: str = ""
    """What every call, or section of calls, begins with and free text never holds; "": a call cannot be told from text."""
    excludes: tuple[str, ...] = ()
    """What free text must not hold either: other texts that the parser takes for the beginning of a call."""
    fingerprint: str = ""
    """Only for models whose chat template has this text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserSpec:
    name: str
    api: int
    factory: str
    """"module:attr", called as `factory(tools: list[dict] | None) -> Parser`, once per choice. The tools are the
    request's, in the shapes of the OpenAI API; [] accepts calls of any name, None leaves calls alone (they are text)."""
    fingerprints: tuple[str, ...]
    """Substrings of chat templates that this format belongs to. Of all specs, the longest that occurs decides."""
    reasoning_start: tuple[str, ...] = ()
    """Texts that open reasoning; empty when the format has none."""
    reasoning_end: tuple[str, ...] = ()
    """Texts that close reasoning: what a grammar waits for."""
    reasoning_close: str = ""
    """What to force when reasoning must stop now (a thinking budget)."""
    reasoning_implied: ReasoningImplied = "never"
    """Whether an output begins inside reasoning although no text opened it, where the prompt's end neither opens nor
    closes it: never; only when the prompt is not known; or always."""
    call_syntaxes: tuple[CallSyntax, ...] = ()
    """How a grammar may write calls for this parser; the first whose fingerprint fits. Empty: none can."""
    example: dict[str, Any]
    """{"transcripts": [{"text": ..., "events": [[kind, text, call_index], ...], "tools": [...], "prompt": ...}]}: the
    last two are optional. The kit feeds every transcript in every split."""


@dataclass(frozen=True, slots=True)
class ParserEvent:
    """One piece of what was said. Pieces of one kind that follow each other belong together."""

    kind: Literal["text", "reasoning", "tool_start", "tool_args", "tool_end"]
    """`tool_end` comes only for a call that was complete: its `tool_args` then concatenate to a JSON object. A call that
    was cut off or broke has none; what could not be read of it follows as text."""
    text: str = ""
    """The piece; for tool_start the function name."""
    call_index: int = 0
    """0, 1, ... in the order of the calls."""
    call_id: str = ""
    """For tool_start: the id that the format itself carries, as Kimi K2's "functions.get_weather:0"; mostly ""."""


class Parser(Protocol):
    """Never raises on model output; the concatenation of events loses no text but the format's own marks.

    `text` must have been detokenized with special tokens shown (`skip_special_tokens=False`): most marks are such."""

    def feed(self, text: str, token_ids: Sequence[int]) -> list[ParserEvent]:
        """What is certain by now. Held back is only what may still become a mark or a value."""
        ...

    def finish(self) -> list[ParserEvent]:
        """The rest; nothing is held back after it. Called once."""
        ...


@runtime_checkable
class SupportsPrompt(Protocol):
    """A parser that looks at how the prompt ends, because templates open or close reasoning there."""

    def begin(self, prompt: str) -> None:
        """The rendered prompt, before the first `feed`."""
        ...
