"""Mistral from its third tokenizer on: [TOOL_CALLS] before a JSON list, or before each name; [THINK] reasoning."""

from __future__ import annotations

from typing import Any

from infer.plugins import ParserSpec, hookimpl
from infer.plugins.parser import API_VERSION, CallSyntax
from infer.plugins.parsing import Dialect, HeaderCalls, JsonCalls, Reasoning, TableParser, called, cut, said, thought

DIALECT = Dialect(
    reasoning=Reasoning(start=("[THINK]",), end=("[/THINK]",)),
    calls=(
        JsonCalls(openers=("[TOOL_CALLS]",)),
        HeaderCalls(call_open=("[TOOL_CALLS]",), name_end=("[ARGS]", ""), id_open="[CALL_ID]"),
    ),
    dropped=("</s>",),
)
SYNTAXES = (
    CallSyntax(
        before_name="[TOOL_CALLS]",
        before_arguments="[ARGS]",
        end="",
        trigger="[TOOL_CALLS]",
        fingerprint="[ARGS]",
    ),
    CallSyntax(
        section_begin="[TOOL_CALLS] [",
        before_name='{"name": "',
        before_arguments='", "arguments": ',
        end="}",
        separator=", ",
        section_end="]",
        trigger="[TOOL_CALLS]",
    ),
)
TRANSCRIPTS: list[dict[str, Any]] = [
    {
        "text": 'Hello[TOOL_CALLS] [{"name": "add", "arguments":{"a": 3.5, "b": 4}}]',
        "events": [*said("Hello"), *called("add", '{"a": 3.5, "b": 4}')],
    },
    {
        "text": '[TOOL_CALLS] [{"arguments":{"name": "John Doe"}, "name": "get_age", "id": "x"}, '
        '{"name": "b", "arguments": {}}]</s>',
        "events": [*called("get_age", '{"name": "John Doe"}'), *called("b", "{}", 1)],
    },
    {
        "text": '[TOOL_CALLS]add_this{"a": 3.5}[TOOL_CALLS]multiply{"a": 3}',
        "events": [*called("add_this", '{"a": 3.5}'), *called("multiply", '{"a": 3}', 1)],
    },
    {
        "text": '[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 1}[TOOL_CALLS]sub[ARGS]{}',
        "events": [*called("add", '{"a": 1}', call_id="abcdefghi"), *called("sub", "{}", 1)],
    },
    {
        "text": "[THINK]Add them.[/THINK]Sure.[TOOL_CALLS]add[ARGS]{}",
        "events": [*thought("Add them."), *said("Sure."), *called("add", "{}")],
    },
    {  # one broken call takes none along
        "text": '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1, oops}}, {"name": "g", "arguments": {}}] and, so on',
        "events": [
            *cut("f", '{"a": 1, '),
            *said("oops}}"),
            *called("g", "{}", 1),
            *said(" and, so on"),
        ],
    },
    {"text": "[TOOL_CALLS] not json at all", "events": said("[TOOL_CALLS] not json at all")},
    {
        "text": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]\nextra data',
        "events": [*called("add", '{"a": 1}'), *said("\nextra data")],
    },
    {"text": '[TOOL_CALLS]add{"a": 1', "events": cut("add", '{"a": 1')},
]


def create(tools: list[dict[str, Any]] | None) -> TableParser:
    return TableParser(DIALECT, tools)


@hookimpl
def infer_parsers() -> list[ParserSpec]:
    return [
        ParserSpec(
            name="mistral",
            api=API_VERSION,
            factory=f"{__name__}:create",
            fingerprints=("[TOOL_CALLS]",),
            **DIALECT.spec_fields(),
            call_syntaxes=SYNTAXES,
            example={"transcripts": TRANSCRIPTS},
        )
    ]
