"""What the API needs of the output parsers: choose one, open it for a request, collect what it says. No engine needed.

Runs in the request's task; owns nothing. Detokenize with `skip_special_tokens=False` when a parser is on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from infer.plugins.parser import Parser, ParserEvent, ParserSpec, SupportsPrompt
from infer.plugins.parsing import dialect
from infer.plugins.registry import Registry
from infer.plugins.tokenizer import Tokenizer

TAIL = 64
"""Last tokens of a prompt that are looked at for what opens or closes reasoning."""
ANYTHING = "…"
"""In a fingerprint: any text, so that two substrings may be required in their order."""


def choose_parser(
    registry: Registry, chat_template: str | Mapping[str, str] | None, name: str | None = None
) -> ParserSpec | None:
    """The parser of that name, or the one whose fingerprint fits the template best; None when none fits.

    Raises `UnknownPluginError`, which lists the parsers, for a name that does not exist."""
    if name is not None:
        return registry.get("parser", name)
    source = "\n".join(chat_template.values()) if isinstance(chat_template, Mapping) else chat_template or ""
    fits = [(_fit(spec, source), spec) for spec in registry.specs("parser")]
    best = max((fit for fit, _ in fits), default=0)
    return next((spec for fit, spec in fits if fit == best), None) if best else None


def _fit(spec: ParserSpec, source: str) -> int:
    """Length of the longest fingerprint of the spec that occurs in the template; 0 for none."""
    return max((len(print_) for print_ in spec.fingerprints if _occurs(print_.split(ANYTHING), source)), default=0)


def _occurs(parts: Sequence[str], source: str) -> bool:
    at = 0
    for part in parts:
        found = source.find(part, at)
        if found < 0:
            return False
        at = found + len(part)
    return True


def open_parser(
    registry: Registry, spec: ParserSpec, tools: Sequence[Mapping[str, Any]] | None, prompt: str | None = None
) -> Parser:
    """A parser for one choice. `tools` None leaves calls alone (no tools, or tool_choice "none"); `prompt` is the
    rendered prompt, which tells whether the template opened or closed reasoning. Raises `PluginLoadError`."""
    parser: Parser = registry.create("parser", spec.name, None if tools is None else [dict(tool) for tool in tools])
    if prompt is not None and isinstance(parser, SupportsPrompt):
        parser.begin(prompt)
    return parser


def prompt_tail(prompt_ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """The end of a rendered prompt, which shows what it opens or closes, with special tokens."""
    return tokenizer.decode(list(prompt_ids[-TAIL:]), skip_special_tokens=False)


def starts_in_reasoning(spec: ParserSpec, prompt: str | None) -> bool:
    """Whether the output after this prompt begins inside reasoning: then a grammar waits for `spec.reasoning_end`."""
    return dialect.starts_in_reasoning(spec.reasoning_start, spec.reasoning_end, spec.reasoning_implied, prompt)


@dataclass(slots=True)
class ParsedCall:
    name: str
    call_id: str
    """The id that the format carries, or ""; see `CallIds`."""
    arguments: str = ""
    """JSON text; of an object when `complete`."""
    complete: bool = False
    """False for a call that was cut off or broke."""


@dataclass(slots=True)
class ParsedOutput:
    """The message of one choice."""

    text: str = ""
    reasoning: str = ""
    calls: list[ParsedCall] = field(default_factory=list)


def collect(events: Iterable[ParserEvent]) -> ParsedOutput:
    """The message that a stream of events amounts to: the same streamed and whole."""
    text: list[str] = []
    reasoning: list[str] = []
    arguments: list[list[str]] = []
    output = ParsedOutput()
    for event in events:
        if event.kind == "text":
            text.append(event.text)
        elif event.kind == "reasoning":
            reasoning.append(event.text)
        elif event.kind == "tool_start":
            output.calls.append(ParsedCall(event.text, event.call_id))
            arguments.append([])
        elif event.kind == "tool_args":
            arguments[event.call_index].append(event.text)
        else:
            output.calls[event.call_index].complete = True
    output.text, output.reasoning = "".join(text), "".join(reasoning)
    for call, pieces in zip(output.calls, arguments, strict=True):
        call.arguments = "".join(pieces)
    return output


def parse_output(parser: Parser, text: str, token_ids: Sequence[int] = ()) -> ParsedOutput:
    """A whole output through a fresh parser."""
    return collect([*parser.feed(text, token_ids), *parser.finish()])


class CallIds:
    """Ids of one message's calls, in order and unique: the format's own where it carries one, else made of `prefix`."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._given: set[str] = set()

    def give(self, call_index: int, own: str) -> str:
        """The id of the call with that index. A bare number is no id outside of its message, so it is replaced."""
        chosen = own
        if not own or own.isdigit() or own in self._given:
            chosen = f"{self._prefix}-{call_index}"
        self._given.add(chosen)
        return chosen
