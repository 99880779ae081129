"""Granite 3: a JSON list behind <|tool_call|> or <tool_call>; reasoning in tags or behind set phrases."""

from __future__ import annotations

from typing import Any

from infer.plugins import ParserSpec, hookimpl
from infer.plugins.parser import API_VERSION, CallSyntax
from infer.plugins.parsing import Dialect, JsonCalls, Reasoning, TableParser, called, said, thought

DIALECT = Dialect(
    reasoning=Reasoning(
        start=("<think>", "Here is my thought process:", "Here's my thought process:"),
        end=("</think>", "Here is my response:", "Here's my response:"),
    ),
    calls=(JsonCalls(openers=("<|tool_call|>", "<tool_call>"), closers=("</tool_call>",)),),
    dropped=("<response>", "</response>", "<|end_of_text|>"),
)
SYNTAX = CallSyntax(
    section_begin="<|tool_call|>[",
    before_name='{"name": "',
    before_arguments='", "arguments": ',
    end="}",
    separator=", ",
    section_end="]",
    trigger="<|tool_call|>",
    excludes=("<tool_call>",),
)
TRANSCRIPTS: list[dict[str, Any]] = [
    {
        "text": 'I check.\n<|tool_call|> [{"name": "get_weather", "arguments": {"city": "Oslo"}}, '
        '{"arguments": {}, "name": "get_time"}]',
        "events": [*said("I check.\n"), *called("get_weather", '{"city": "Oslo"}'), *called("get_time", "{}", 1)],
    },
    {"text": '<tool_call>[{"name": "f", "arguments": {}}] Done.', "events": [*called("f", "{}"), *said(" Done.")]},
    {
        "text": "Here is my thought process: A. Here is my response: B",
        "events": [*thought(" A. "), *said(" B")],
    },
    {"text": "<think>A</think><response>B</response>", "events": [*thought("A"), *said("B")]},
    {"text": "Here is my thought", "events": said("Here is my thought")},
    {
        "text": '<|tool_call|> [{"name": "f", "arguments": "no"}]',
        "events": said('<|tool_call|> [{"name": "f", "arguments": "no"}]'),
    },
]


def create(tools: list[dict[str, Any]] | None) -> TableParser:
    return TableParser(DIALECT, tools)


@hookimpl
def infer_parsers() -> list[ParserSpec]:
    return [
        ParserSpec(
            name="granite",
            api=API_VERSION,
            factory=f"{__name__}:create",
            fingerprints=("<|tool_call|>", "<|start_of_role|>available_tools<|end_of_role|>…<|tool_call|>"),
            **DIALECT.spec_fields(),
            call_syntaxes=(SYNTAX,),
            example={"transcripts": TRANSCRIPTS},
        )
    ]
