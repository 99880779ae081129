"""From `structured_output` and `thinking_budget` to what the worker follows: a compiled grammar, the reasoning marks.

Runs in request tasks; part of admission.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from infer.engine.step import ReasoningSpec
from infer.engine.structured import GrammarStore, grammar_source
from infer.errors import ConfigError, InvalidRequestError
from infer.plugins.parser import ParserSpec
from infer.text.output_parsing import choose_parser, prompt_tail, starts_in_reasoning
from infer.types import SamplingParams

if TYPE_CHECKING:
    from infer.plugins.registry import Registry
    from infer.plugins.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Guidance:
    """What a request's `SamplingSpec` says of its grammar and its reasoning, and what must be held while it runs."""

    fields: dict[str, Any] = field(default_factory=dict)
    held: object = None


NO_GUIDANCE = Guidance()


class GuidedAdmission:
    """Checks and compiles what guides an output. `parser` knows the model's reasoning marks; None: it does not reason."""

    def __init__(self, grammars: GrammarStore, tokenizer: Tokenizer, parser: ParserSpec | None) -> None:
        self._grammars = grammars
        self._tokenizer = tokenizer
        self._parser = parser if parser is not None and parser.reasoning_end else None

    async def guidance(
        self, params: SamplingParams, stop_ids: dict[int, int | None], prompt_ids: Sequence[int]
    ) -> Guidance:
        """Raises `GrammarError` or `InvalidRequestError`."""
        asked, budget = params.structured_output, params.thinking_budget
        if asked is None and budget is None:
            return NO_GUIDANCE
        if budget is not None and self._parser is None:
            raise InvalidRequestError(
                f"thinking_budget={budget}: the model's chat template shows no reasoning that infer knows; name its format "
                "with structured_output.reasoning_parser",
                parameter="thinking_budget",
                value=budget,
            )
        fields: dict[str, Any] = {"thinking_budget": budget}
        held = None
        if asked is not None:
            source = grammar_source(asked)
            held = await self._grammars.admit(source)
            special = self._grammars.vocabulary.special_ids
            fields["grammar"] = source
            fields["end_ids"] = tuple(i for i, reason in stop_ids.items() if reason is None or i in special)
        if self._parser is not None:
            fields["reasoning"] = self._reasoning(self._parser, prompt_ids)
        return Guidance(fields, held)

    def _reasoning(self, parser: ParserSpec, prompt_ids: Sequence[int]) -> ReasoningSpec | None:
        """None when the prompt has closed it already."""
        tail = prompt_tail(prompt_ids, self._tokenizer)
        is_open = starts_in_reasoning(parser, tail)
        if not is_open and tail.rstrip().endswith(parser.reasoning_end):
            return None
        close = parser.reasoning_close or parser.reasoning_end[0]
        return ReasoningSpec(
            starts=tuple(start.encode() for start in parser.reasoning_start),
            ends=tuple(end.encode() for end in parser.reasoning_end),
            close_ids=tuple(self._tokenizer.encode(close, add_special_tokens=False)),
            is_open=is_open,
        )


def reasoning_parser(registry: Registry, name: str, template: str | dict[str, str] | None) -> ParserSpec | None:
    """The parser whose marks hold: of that name, "none", or for "auto" the one that the chat template
    shows. Raises `UnknownPluginError`, or `ConfigError` when the named one knows no reasoning."""
    if name == "none":
        return None
    if name != "auto":
        spec = registry.get("parser", name)
        if not spec.reasoning_end:
            raise ConfigError(
                f"structured_output.reasoning_parser={name}: that format has no reasoning",
                fields=("structured_output.reasoning_parser",),
            )
        return spec
    return choose_parser(registry, template)
