"""Llama 3.1 to 3.3: calls as bare JSON objects in the text, several parted by semicolons."""

from __future__ import annotations

from typing import Any

from infer.plugins import ParserSpec, hookimpl
from infer.plugins.parser import API_VERSION, CallSyntax
from infer.plugins.parsing import SAMPLE_TOOLS, Dialect, JsonCalls, TableParser, called, cut, said

DIALECT = Dialect(
    calls=(
        JsonCalls(openers=("<|python_tag|>",), separators=(";", ",")),
        JsonCalls(openers=("{",), separators=(";", ","), bare=True),
    ),
    dropped=("<|eom_id|>", "<|eot_id|>"),
)
SYNTAX = CallSyntax(before_name='{"name": "', before_arguments='", "parameters": ', end="}", separator="; ")
TRANSCRIPTS: list[dict[str, Any]] = [
    {"text": "This is just some text {not a call}.", "events": said("This is just some text {not a call}.")},
    {
        "text": '{"name": "get_weather", "parameters": {"city": "Oslo", "days": 10}}<|eom_id|>',
        "events": called("get_weather", '{"city": "Oslo", "days": 10}'),
        "tools": SAMPLE_TOOLS,
    },
    {
        "text": 'Here: {"name": "get_time", "parameters": {}} Would you like {more}?',
        "events": [*said("Here: "), *called("get_time", "{}"), *said(" Would you like {more}?")],
    },
    {
        "text": '{"name": "a", "parameters": {"q": "x {y} [z]"}} ; {"name": "b", "arguments": {}};\n'
        '{"type": "function", '
        '"name": "c", "parameters": {"l": {"m": {"n": "\\"deep\\""}}}}',
        "events": [
            *called("a", '{"q": "x {y} [z]"}'),
            *called("b", "{}", 1),
            *called("c", '{"l": {"m": {"n": "\\"deep\\""}}}', 2),
        ],
    },
    {
        "text": '<|python_tag|>{"name": "get_time", "parameters": {}}',
        "events": called("get_time", "{}"),
    },
    {"text": "<|python_tag|>print(1)", "events": said("<|python_tag|>print(1)")},
    {
        "text": '{"name": "a", "parameters": {invalid json}',
        "events": said('{"name": "a", "parameters": {invalid json}'),
    },
    {"text": '{"parameters": {}}', "events": said('{"parameters": {}}')},
    {"text": '{"name": "a"}', "events": said('{"name": "a"}')},
    {"text": '{"name": "Ann", "age": 3}', "events": said('{"name": "Ann", "age": 3}')},
    {  # an answer in JSON that looks like a call of no tool of the request
        "text": '{"name": "Ann", "parameters": {}}',
        "events": said('{"name": "Ann", "parameters": {}}'),
        "tools": SAMPLE_TOOLS,
    },
    {
        "text": '{"name": "get_time", "parameters": {}} The arguments were {"query": "x"}',
        "events": [*called("get_time", "{}"), *said(' The arguments were {"query": "x"}')],
    },
    {"text": '{"name": "a", "parameters": {"q": "cu', "events": cut("a", '{"q": "cu')},
]


def create(tools: list[dict[str, Any]] | None) -> TableParser:
    return TableParser(DIALECT, tools)


@hookimpl
def infer_parsers() -> list[ParserSpec]:
    return [
        ParserSpec(
            name="llama3_json",
            api=API_VERSION,
            factory=f"{__name__}:create",
            fingerprints=('{"name": function name, "parameters": dictionary of argument name',),
            **DIALECT.spec_fields(),
            call_syntaxes=(SYNTAX,),
            example={"transcripts": TRANSCRIPTS},
        )
    ]
