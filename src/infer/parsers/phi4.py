"""Phi-4-mini: a JSON list behind functools or between <|tool_call|> marks; <think> tags in the reasoning models."""

from __future__ import annotations

from typing import Any

from infer.plugins import ParserSpec, hookimpl
from infer.plugins.parser import API_VERSION, CallSyntax
from infer.plugins.parsing import Dialect, JsonCalls, Reasoning, TableParser, called, said, thought

DIALECT = Dialect(
    reasoning=Reasoning(),
    calls=(JsonCalls(openers=("functools", "<|tool_call|>"), closers=("<|/tool_call|>",)),),
    dropped=("<|end|>",),
)
SYNTAX = CallSyntax(
    section_begin="<|tool_call|>[",
    before_name='{"name": "',
    before_arguments='", "arguments": ',
    end="}",
    separator=", ",
    section_end="]<|/tool_call|>",
    trigger="<|tool_call|>",
    excludes=("functools",),
)
TRANSCRIPTS: list[dict[str, Any]] = [
    {
        "text": 'Let me check.\nfunctools[{"name": "get_weather", "arguments": {"city": "Tokyo"}}]\nMore?',
        "events": [*said("Let me check.\n"), *called("get_weather", '{"city": "Tokyo"}'), *said("\nMore?")],
    },
    {
        "text": 'functools[\n  {"name": "a", "arguments": {"o": {"k": "v"}}},\n  {"name": "b", '
        '"parameters": {}}\n]<|end|>',
        "events": [*called("a", '{"o": {"k": "v"}}'), *called("b", "{}", 1)],
    },
    {"text": '<|tool_call|>[{"name": "a", "arguments": {}}]<|/tool_call|>', "events": called("a", "{}")},
    {"text": "functools[] This is just text", "events": said("functools[] This is just text")},
    {"text": "import functools\n", "events": said("import functools\n")},
    {
        "text": '<think>A</think>functools[{"name": "f", "arg',
        "events": [*thought("A"), *said('functools[{"name": "f", "arg')],
    },
]


def create(tools: list[dict[str, Any]] | None) -> TableParser:
    return TableParser(DIALECT, tools)


@hookimpl
def infer_parsers() -> list[ParserSpec]:
    return [
        ParserSpec(
            name="phi4",
            api=API_VERSION,
            factory=f"{__name__}:create",
            fingerprints=("<|tool|>", "functools[", "<|/tool_call|>"),
            **DIALECT.spec_fields(),
            call_syntaxes=(SYNTAX,),
            example={"transcripts": TRANSCRIPTS},
        )
    ]
