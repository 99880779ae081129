"""What becomes of the text of a chat: the answer, the reasoning and the tool calls told apart, when a choice has ended.

`AnswerFormat` is the engine's, `AnswerReader` one request's. Runs in request tasks; part of the facade.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from infer.answer import ParsedAnswer, ToolCall
from infer.engine.prompts import check_tools, is_chat
from infer.engine.structured_admission import reasoning_parser
from infer.errors import InvalidRequestError
from infer.plugins.parser import ParserEvent, ParserSpec
from infer.text.call_grammar import syntax_of
from infer.text.detokenizer import Detokenizer
from infer.text.output_parsing import CallIds, ParsedOutput, choose_parser, collect, open_parser, prompt_tail
from infer.text.special_filter import SpecialTokenFilter
from infer.text.tool_words import told_in_words

if TYPE_CHECKING:
    from infer.plugins.registry import Registry
    from infer.plugins.tokenizer import Tokenizer

GENERIC = "hermes"
"""How calls are written where the chat template shows no tools."""
SHORT_ID = 9
"""Characters of a call's id that Mistral's templates insist on."""


class AnswerFormat:
    """How the loaded model reasons and calls."""

    def __init__(self, registry: Registry, tokenizer: Tokenizer, template: str, reasoning: str) -> None:
        """`template`: source of the chat template. `reasoning`: `structured_output.reasoning_parser`."""
        self._registry = registry
        self._tokenizer = tokenizer
        self._template = template
        self._own = choose_parser(registry, template)
        found = reasoning_parser(registry, reasoning, template)
        self._reasoning = found if found is not None and found.reasoning_end else None
        self._shows_tools = re.search(r"\btools\b", template) is not None

    def told(self, prompt: Any, tools: Sequence[dict[str, Any]] | None) -> tuple[Any, Sequence[dict[str, Any]] | None]:
        """The prompt and the tools as the template takes them: one that shows no tools is told of them in words.

        Raises `InvalidRequestError` for what is no tools, and where nothing is known that calls could be told by.
        """
        check_tools(tools, is_chat(prompt))
        if not tools or not all(isinstance(message, dict) for message in prompt):
            return prompt, tools
        if self._shows_tools:
            if self._own is None:
                raise InvalidRequestError(
                    "tools: the model's chat template writes calls in a format that infer does not know, so none would be "
                    "found; leave tools out and write them into the prompt",
                    parameter="tools",
                )
            return prompt, tools
        spec = self._registry.get("parser", GENERIC)
        syntax = syntax_of(spec, self._template)
        if syntax is None:
            raise InvalidRequestError(f"tools: {spec.name} has no written form of calls", parameter="tools")
        try:
            return told_in_words(prompt, tools, syntax), None
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequestError(f"tools, or calls in messages, are no JSON: {error}", parameter="tools") from None

    def reader(
        self, prompt: Any, prompt_ids: Sequence[int], tools: Sequence[dict[str, Any]] | None
    ) -> AnswerReader | None:
        """Of one request; None for a prompt that is no chat. Without tools calls are text."""
        if not is_chat(prompt):
            return None
        calls = None
        if tools:
            calls = self._own if self._shows_tools else self._registry.get("parser", GENERIC)
        return AnswerReader(self._registry, self._tokenizer, prompt_ids, tools, calls, self._reasoning)


class AnswerReader:
    """Reads whole outputs of one prompt."""

    def __init__(
        self,
        registry: Registry,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        tools: Sequence[dict[str, Any]] | None,
        calls: ParserSpec | None,
        reasoning: ParserSpec | None,
    ) -> None:
        self._registry = registry
        self._tokenizer = tokenizer
        self._prompt_ids = prompt_ids
        self._tools = list(tools or ())
        self._calls = calls
        self._reasoning = reasoning

    def read(self, text: str, token_ids: Sequence[int], name: str, *, cut_at: str | None = None) -> ParsedAnswer:
        """`text` is what the caller is given, of `token_ids` without an end that is not shown; `name` begins the ids of calls.
        `cut_at`: the stop string that ended it."""
        if self._calls is None and self._reasoning is None:
            return ParsedAnswer(content=text)
        raw = self._raw(token_ids)
        if cut_at is not None and not text.endswith(cut_at):
            raw = raw[: raw.rfind(cut_at)] if cut_at in raw else text
        parsed = collect(self._cleaned(self._events(raw, token_ids), token_ids))
        return ParsedAnswer(content=parsed.text, reasoning=parsed.reasoning, tool_calls=self._tool_calls(parsed, name))

    def _raw(self, token_ids: Sequence[int]) -> str:
        """With special tokens: many formats are marked by them."""
        detokenizer = Detokenizer(self._tokenizer, self._prompt_ids, False)
        return "".join([*map(detokenizer.feed, token_ids), detokenizer.finish()])

    def _events(self, raw: str, token_ids: Sequence[int]) -> list[ParserEvent]:
        prompt = prompt_tail(self._prompt_ids, self._tokenizer)
        calls, reasoning = self._calls, self._reasoning
        if calls is None or (reasoning is not None and reasoning.name == calls.name):
            spec = calls or reasoning
            return [] if spec is None else self._parsed(spec, raw, token_ids, prompt)
        if reasoning is None:  # what the format would take for reasoning is text
            events = self._parsed(calls, raw, token_ids, calls.reasoning_end[0] if calls.reasoning_end else "")
            return [ParserEvent("text", e.text) if e.kind == "reasoning" else e for e in events]
        events = self._parsed(reasoning, raw, token_ids, prompt)
        rest = "".join(event.text for event in events if event.kind == "text")
        behind = calls.reasoning_end[0] if calls.reasoning_end else ""
        return [*(e for e in events if e.kind == "reasoning"), *self._parsed(calls, rest, (), behind)]

    def _parsed(self, spec: ParserSpec, raw: str, token_ids: Sequence[int], prompt: str) -> list[ParserEvent]:
        parser = open_parser(self._registry, spec, self._tools if spec is self._calls else None, prompt)
        return [*parser.feed(raw, token_ids), *parser.finish()]

    def _cleaned(self, events: Sequence[ParserEvent], token_ids: Sequence[int]) -> Iterator[ParserEvent]:
        """Without special tokens, a run of text or reasoning at a time: what runs join to is the model's own."""
        tokenizer = self._tokenizer
        shown = SpecialTokenFilter(
            getattr(tokenizer, "special_token_ids", frozenset()),
            lambda token_id: tokenizer.decode([token_id], skip_special_tokens=False),
        )
        shown.see(token_ids)
        for kind, run in groupby(events, key=lambda event: event.kind):
            if kind in ("text", "reasoning"):
                yield ParserEvent(kind, shown.clean(kind, "".join(event.text for event in run), last=True))
            else:
                yield from run

    def _tool_calls(self, parsed: ParsedOutput, name: str) -> tuple[ToolCall, ...]:
        ids, found = CallIds(f"call-{name}"), []
        for index, call in enumerate(parsed.calls):
            call_id = ids.give(index, call.call_id)
            if self._calls is not None and self._calls.name == "mistral":
                call_id = hashlib.sha256(call_id.encode()).hexdigest()[:SHORT_ID]
            found.append(ToolCall(id=call_id, name=call.name, arguments=call.arguments, complete=call.complete))
        return tuple(found)
