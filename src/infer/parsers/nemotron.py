"""Nemotron Nano v2: a JSON list between <TOOLCALL> tags, reasoning that the template opens."""

from __future__ import annotations

from typing import Any

from infer.plugins import ParserSpec, hookimpl
from infer.plugins.parser import API_VERSION, CallSyntax
from infer.plugins.parsing import Dialect, JsonCalls, Reasoning, TableParser, called, said, thought

DIALECT = Dialect(
    reasoning=Reasoning(),
    calls=(JsonCalls(openers=("<TOOLCALL>",), closers=("</TOOLCALL>",)),),
    dropped=("<SPECIAL_12>",),
)
SYNTAX = CallSyntax(
    section_begin="<TOOLCALL>[",
    before_name='{"name": "',
    before_arguments='", "arguments": ',
    end="}",
    separator=", ",
    section_end="]</TOOLCALL>",
    trigger="<TOOLCALL>",
)
TRANSCRIPTS: list[dict[str, Any]] = [
    {
        "text": 'Let me check.<TOOLCALL>[{"name": "a", "arguments": {"f": {"c": "T"}, '
        '"i": [{"name": "x"}]}}, {"name": "b", '
        '"arguments": "{\\"sql\\": \\"select 1\\"}"}]</TOOLCALL>',
        "events": [
            *said("Let me check."),
            *called("a", '{"f": {"c": "T"}, "i": [{"name": "x"}]}'),
            *called("b", '{"sql": "select 1"}', 1),
        ],
    },
    {"text": '<TOOLCALL>{"name": "a", "arguments": {}}</TOOLCALL>', "events": called("a", "{}")},
    {
        "text": 'Hm.\n</think>\n<TOOLCALL>[{"name": "a", "arguments": {}}]</TOOLCALL>',
        "prompt": "<SPECIAL_11>Assistant\n<think>\n",
        "events": [*thought("Hm.\n"), *called("a", "{}")],
    },
    {"text": "<TOOLCALL>[]</TOOLCALL>", "events": said("<TOOLCALL>[]</TOOLCALL>")},
]


def create(tools: list[dict[str, Any]] | None) -> TableParser:
    return TableParser(DIALECT, tools)


@hookimpl
def infer_parsers() -> list[ParserSpec]:
    return [
        ParserSpec(
            name="nemotron",
            api=API_VERSION,
            factory=f"{__name__}:create",
            fingerprints=("<TOOLCALL>",),
            **DIALECT.spec_fields(),
            call_syntaxes=(SYNTAX,),
            example={"transcripts": TRANSCRIPTS},
        )
    ]
