"""What becomes of a model's text in chat: reasoning, tool calls and the answer told apart, in the form that the request needs.

`AnswerFormats` is the server's, `AnswerPlan` one request's, `AnswerReader` one choice's. Runs in request tasks.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from infer.api.tool_requests import ANY_OBJECT, NO_TOOLS, ToolRequest
from infer.engine.structured_admission import reasoning_parser
from infer.errors import InvalidRequestError
from infer.plugins.parser import CallSyntax, Parser, ParserEvent, ParserSpec
from infer.text.call_grammar import call_or_form, may_call, must_call, syntax_of
from infer.text.output_parsing import CallIds, choose_parser, open_parser, prompt_tail
from infer.text.special_filter import SpecialTokenFilter
from infer.text.tool_words import told_in_words

if TYPE_CHECKING:
    from infer.config.engine import ApiSection
    from infer.engine.engine import Engine
    from infer.plugins.registry import Registry
    from infer.plugins.tokenizer import Tokenizer

GENERIC = "hermes"
"""The format of calls for models whose own cannot be written by a grammar, or is not known."""
SHORT_ID = 9
"""Characters of a call's id that Mistral's templates insist on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormats:
    """How the served model reasons and calls."""

    registry: Registry
    template: str
    """Source of the chat template."""
    calls: ParserSpec | None
    reasoning: ParserSpec | None
    calls_known: bool
    """False where the operator has switched calls off."""

    @classmethod
    def of(cls, engine: Engine, settings: ApiSection) -> AnswerFormats:
        """Raises `UnknownPluginError`, which lists the parsers, or `ConfigError` for one without reasoning."""
        registry, template = engine.registry, engine.prompts.template_source
        calls = None
        if settings.tool_parser != "none":
            calls = choose_parser(registry, template, None if settings.tool_parser == "auto" else settings.tool_parser)
        reasons: ParserSpec | None = None
        if settings.reasoning_parser != "none":
            name = settings.reasoning_parser
            if name == "auto":
                name = engine.config.structured_output.reasoning_parser
            reasons = reasoning_parser(registry, name, template)
            if reasons is None and name == "auto":
                reasons = calls
        if reasons is not None and not reasons.reasoning_end:
            reasons = None
        return cls(
            registry=registry,
            template=template,
            calls=calls,
            reasoning=reasons,
            calls_known=settings.tool_parser != "none",
        )

    @property
    def shows_tools(self) -> bool:
        """Whether the chat template writes the tools of a request."""
        return re.search(r"\btools\b", self.template) is not None

    @property
    def calls_auto(self) -> bool:
        """Whether calls are found that the model makes of its own accord."""
        return self.calls_known and (self.calls is not None or not self.shows_tools)

    @property
    def wants_short_ids(self) -> bool:
        return self.calls is not None and self.calls.name == "mistral"

    def plan(self, asked: ToolRequest, response_form: dict[str, Any] | None) -> AnswerPlan:
        """`response_form`: what response_format and its like ask for, as `SamplingParams.structured_output`.

        Raises `InvalidRequestError` for what cannot be had together."""
        plan = AnswerPlan(formats=self, asked=asked, form=response_form)
        if asked.mode == "none":
            return plan
        if not self.calls_known:
            raise InvalidRequestError(
                "tools are not supported: the server runs with api.tool_parser=none", parameter="tools"
            )
        spec, syntax = self._call_format(asked)
        return replace(plan, calls=spec, form=_form(asked, spec, syntax, response_form))

    def _call_format(self, asked: ToolRequest) -> tuple[ParserSpec, CallSyntax | None]:
        """The model's own where that will do, else the generic one."""
        if self.calls is not None:
            syntax = syntax_of(self.calls, self.template)
            if syntax is not None or (asked.mode == "auto" and self.shows_tools):
                return self.calls, syntax
        elif asked.mode == "auto" and self.shows_tools:
            raise InvalidRequestError(
                'tool_choice="auto" needs to know how the model writes calls, and its chat template has no format that '
                "infer knows: name one with api.tool_parser, or ask for tool_choice=required",
                parameter="tool_choice",
                value="auto",
            )
        generic = self.registry.get("parser", GENERIC)
        return generic, syntax_of(generic, self.template)

    def messages(self, messages: Sequence[dict[str, Any]], asked: ToolRequest) -> list[dict[str, Any]]:
        """The conversation for the template: one that knows no tools is told of them in words."""
        if self.shows_tools:
            return list(messages)
        spec, syntax = self._call_format(asked)
        if syntax is None:
            raise _inexpressible(spec, "tools", "a conversation with tools")
        return told_in_words(messages, asked.tools, syntax)


def _form(
    asked: ToolRequest, spec: ParserSpec, syntax: CallSyntax | None, form: dict[str, Any] | None
) -> dict[str, Any] | None:
    """`SamplingParams.structured_output` of a request with tools."""
    several = asked.parallel
    if asked.mode == "required":
        if syntax is None:
            raise _inexpressible(spec, "tool_choice", "required and named choice")
        return {"structural_tag": must_call(syntax, asked.schemas, several=several)}
    loose = {name: schema if name in asked.strict else ANY_OBJECT for name, schema in asked.schemas.items()}
    if form is not None:
        if syntax is None or not syntax.trigger:
            raise _inexpressible(spec, "response_format", "a form of the answer beside tools")
        schema = ANY_OBJECT if form.get("json_object") else form.get("json_schema")
        if schema is None or set(form) - {"json_object", "json_schema"}:
            raise InvalidRequestError(
                "only JSON (response_format) can be the form of an answer beside tools", parameter="structured_outputs"
            )
        return {"structural_tag": call_or_form(syntax, loose, several=several, form=schema)}
    if not asked.strict:
        return None
    if syntax is None or not syntax.trigger:
        raise _inexpressible(spec, "tools", 'strict=true with tool_choice="auto"')
    return {"structural_tag": may_call(syntax, loose, several=several)}


def _inexpressible(spec: ParserSpec, parameter: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{what} is not supported for this model: in its format ({spec.name}) a grammar cannot hold calls apart from text; "
        "leave it out, or choose another format with api.tool_parser",
        parameter=parameter,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPlan:
    """How the answers to one request are made and read."""

    formats: AnswerFormats
    asked: ToolRequest = NO_TOOLS
    calls: ParserSpec | None = None
    """None: text that looks like a call is text."""
    form: dict[str, Any] | None = None
    """`SamplingParams.structured_output`."""
    hides_special: bool = True

    @property
    def reads(self) -> bool:
        """Whether text goes through a parser: then it must be detokenized with special tokens shown."""
        return self.calls is not None or self.formats.reasoning is not None

    def open(self, prompt_ids: Sequence[int], tokenizer: Tokenizer) -> Parser:
        """A parser for one choice."""
        prompt = None
        if prompt_ids and self.reads:
            prompt = prompt_tail(prompt_ids, tokenizer)
        registry, calls, reasoning = self.formats.registry, self.calls, self.formats.reasoning
        if calls is None:
            return _NoParser() if reasoning is None else open_parser(registry, reasoning, None, prompt)
        if reasoning is not None and reasoning.name == calls.name:
            return open_parser(registry, calls, self.asked.tools, prompt)
        behind = calls.reasoning_end[0] if calls.reasoning_end else ""
        inner = open_parser(registry, calls, self.asked.tools, behind)
        return _Chain(None if reasoning is None else open_parser(registry, reasoning, None, prompt), inner)


class _NoParser:
    def feed(self, text: str, token_ids: Sequence[int]) -> list[ParserEvent]:
        return [ParserEvent("text", text)] if text else []

    def finish(self) -> list[ParserEvent]:
        return []


class _Chain:
    """Reasoning by one parser, calls in what it leaves by another. Without the first, reasoning is text."""

    def __init__(self, reasoning: Parser | None, calls: Parser) -> None:
        self._reasoning = reasoning or _NoParser()
        self._calls = calls
        self._keeps_reasoning = reasoning is not None

    def feed(self, text: str, token_ids: Sequence[int]) -> list[ParserEvent]:
        return self._inner(self._reasoning.feed(text, token_ids))

    def finish(self) -> list[ParserEvent]:
        return [*self._inner(self._reasoning.finish()), *map(self._kept, self._calls.finish())]

    def _inner(self, events: Sequence[ParserEvent]) -> list[ParserEvent]:
        found: list[ParserEvent] = []
        for event in events:
            if event.kind == "text":
                found += map(self._kept, self._calls.feed(event.text, ()))
            else:
                found.append(event)
        return found

    def _kept(self, event: ParserEvent) -> ParserEvent:
        return event if self._keeps_reasoning or event.kind != "reasoning" else ParserEvent("text", event.text)


@dataclass(slots=True)
class CallPiece:
    """What one call gained; `name` and `call_id` in its first piece."""

    index: int
    name: str = ""
    call_id: str = ""
    arguments: str = ""


@dataclass(slots=True)
class Piece:
    """What a choice gained."""

    text: str = ""
    reasoning: str = ""
    calls: list[CallPiece] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.calls)


def _add(event: ParserEvent, piece: Piece) -> None:
    if event.kind == "text":
        piece.text += event.text
    elif event.kind == "reasoning":
        piece.reasoning += event.text
    elif event.kind == "tool_start":
        piece.calls.append(CallPiece(event.call_index, event.text, event.call_id))
    elif event.kind == "tool_args":
        if piece.calls and piece.calls[-1].index == event.call_index:
            piece.calls[-1].arguments += event.text
        else:
            piece.calls.append(CallPiece(event.call_index, arguments=event.text))


class AnswerReader:
    """One choice: pieces of the model's text in, pieces of the message out. Whole and streamed give the same."""

    def __init__(
        self, plan: AnswerPlan, prompt_ids: Sequence[int], tokenizer: Tokenizer, id_prefix: str, text_of: Any
    ) -> None:
        self._parser = plan.open(prompt_ids, tokenizer)
        self._tokenizer = tokenizer
        hidden: frozenset[int] = frozenset()
        if plan.reads and plan.hides_special:
            hidden = getattr(tokenizer, "special_token_ids", hidden)
        self._filter = SpecialTokenFilter(hidden, text_of)
        self._ids = CallIds(id_prefix)
        self._short_ids = plan.formats.wants_short_ids
        self._limit = None if plan.asked.parallel else 1
        self._reasoned: list[list[str]] = []
        """Each run of reasoning as the model wrote it."""
        self._last: ParserEvent | None = None
        self.complete_calls = 0

    def feed(self, text: str, token_ids: Sequence[int], *, last: bool = False) -> Piece:
        """`last`: nothing follows; what was held back comes out."""
        piece = Piece()
        for event in self.read(text, token_ids, last=last):
            _add(event, piece)
        return piece

    def read(self, text: str, token_ids: Sequence[int], *, last: bool = False) -> list[ParserEvent]:
        """As `feed`, with what was said in its order: for replies that keep text, reasoning and calls as a list. Calls
        have ids that are unique in the choice."""
        self._filter.see(token_ids)
        events = self._parser.feed(text, token_ids) if text else []
        if last:
            events += self._parser.finish()
        said: list[ParserEvent] = []
        for event in events:
            if self._last is not None and event.kind != self._last.kind:
                self._end_run(self._last, said)
            self._take(event, said)
            self._last = event
        if last and self._last is not None:
            self._end_run(self._last, said)
        return said

    def _end_run(self, event: ParserEvent, said: list[ParserEvent]) -> None:
        """No special token goes on in something else: what was held back because it began like one is the model's own."""
        if event.kind in ("text", "reasoning"):
            self._say(event, self._filter.clean(event.kind, "", last=True), said)

    def _take(self, event: ParserEvent, said: list[ParserEvent]) -> None:
        if event.kind in ("text", "reasoning"):
            if event.kind == "reasoning":
                if self._last is None or self._last.kind != "reasoning":
                    self._reasoned.append([])
                self._reasoned[-1].append(event.text)
            self._say(event, self._filter.clean(event.kind, event.text), said)
        elif self._limit is None or event.call_index < self._limit:
            if event.kind == "tool_end":
                self.complete_calls += 1
            elif event.kind == "tool_start":
                event = replace(event, call_id=self._call_id(event))
            said.append(event)

    def _say(self, event: ParserEvent, text: str, said: list[ParserEvent]) -> None:
        if text:
            said.append(replace(event, text=text))

    def _call_id(self, event: ParserEvent) -> str:
        call_id = self._ids.give(event.call_index, event.call_id)
        return hashlib.sha256(call_id.encode()).hexdigest()[:SHORT_ID] if self._short_ids else call_id

    def count_reasoning(self, token_ids: Sequence[int]) -> int:
        """How many of the choice's tokens are reasoning, its marks left out."""
        runs = [run for run in map("".join, self._reasoned) if run]
        if not runs:
            return 0
        ids, count, position = list(token_ids), 0, 0
        raw = self._decode(ids)
        for run in runs:
            start = raw.find(run, position)
            if start < 0:  # a mark in the middle of a run was dropped
                continue
            position = start + len(run)
            count += self._first_at(ids, position) - self._first_at(ids, start + 1) + 1
        return count

    def _first_at(self, ids: list[int], length: int) -> int:
        """The smallest number of tokens whose text has so many characters."""
        low, high = 0, len(ids)
        while low < high:
            middle = (low + high) // 2
            if len(self._decode(ids[:middle])) >= length:
                high = middle
            else:
                low = middle + 1
        return low

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)
