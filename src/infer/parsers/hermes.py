"""Hermes, Qwen2.5, Granite 4 and many more: JSON between <tool_call> tags; reasoning in <think> tags if at all."""

from __future__ import annotations

from typing import Any

from infer.plugins import ParserSpec, hookimpl
from infer.plugins.parser import API_VERSION, CallSyntax
from infer.plugins.parsing import SAMPLE_TOOLS, Dialect, JsonCalls, Reasoning, TableParser, called, cut, said, thought

DIALECT = Dialect(
    reasoning=Reasoning(),
    calls=(
        JsonCalls(openers=("<tool_call>",), closers=("</tool_call>",)),
        JsonCalls(openers=("<tool_calls>",), closers=("</tool_calls>",), separators=("",)),
    ),
    dropped=("<|im_end|>",),
)
SYNTAX = CallSyntax(
    before_name='<tool_call>\n{"name": "',
    before_arguments='", "arguments": ',
    end="}\n</tool_call>",
    separator="\n",
    trigger="<tool_call>",
    excludes=("<tool_calls>",),
)
TRANSCRIPTS: list[dict[str, Any]] = [
    {"text": "Just an answer, with a < and a <tool.", "events": said("Just an answer, with a < and a <tool.")},
    {
        "text": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>',
        "events": called("get_weather", '{"city": "Paris", "days": 3}'),
        "tools": SAMPLE_TOOLS,
    },
    {
        "text": 'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call><|im_end|>',
        "events": [
            *said("I look.\n"),
            *called("get_weather", '{"city": "Oslo"}'),
            *called("get_time", "{}", 1),
        ],
    },
    {  # the arguments before the name, already serialized, or missing
        "text": '<tool_call>{"arguments": {"city": "Oslo"}, "name": "get_weather"}</tool_call>'
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Rome\\"}"}</tool_call>'
        '<tool_call>{"name": "get_time"}</tool_call>',
        "events": [
            *called("get_weather", '{"city": "Oslo"}'),
            *called("get_weather", '{"city": "Rome"}', 1),
            *called("get_time", "{}", 2),
        ],
    },
    {  # every JSON type, escapes, and marks inside strings
        "text": '<tool_call>{"name": "f", "arguments": {"s": "a \\"b\\" </tool_call> \\u00e9\\n", "i": -1, "f": 2.5e3, '
        '"b": true, "n": null, "a": [1, "x", []], "o": {"k": {}}}}</tool_call>',
        "events": called(
            "f",
            '{"s": "a \\"b\\" </tool_call> \\u00e9\\n", "i": -1, "f": 2.5e3, '
            '"b": true, "n": null, "a": [1, "x", []], "o": {"k": {}}}',
        ),
    },
    {  # slips that are mended: a line break and a wild backslash in a string
        "text": '<tool_call>{"name": "f", "arguments": {"s": "a\nb \\d"}}</tool_call>',
        "events": called("f", '{"s": "a\\nb \\\\d"}'),
    },
    {  # no call: the text stays whole
        "text": "<tool_call>\n{'name': 'f'}\n</tool_call> done",
        "events": said("<tool_call>\n{'name': 'f'}\n</tool_call> done"),
    },
    {
        "text": '<tool_call>{"name": "f", "arguments": "not an object"}</tool_call>',
        "events": said('<tool_call>{"name": "f", "arguments": "not an object"}</tool_call>'),
    },
    {  # breaks in the middle: what was said stays, the rest is text, the next call is read
        "text": '<tool_call>{"name": "f", "arguments": {"a": 1, oops}}</tool_call>'
        '<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        "events": [*cut("f", '{"a": 1, '), *said("oops}}</tool_call>"), *called("g", "{}", 1)],
    },
    {"text": '<tool_call>{"name": "f", "arguments": {"a": "cut o', "events": cut("f", '{"a": "cut o')},
    {"text": '<tool_call>\n{"name": "f", "argu', "events": said('<tool_call>\n{"name": "f", "argu')},
    {  # closing marks that the model forgot
        "text": '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>',
        "events": called("f", '{"a": 1}'),
    },
    {"text": '<tool_call>\n{"name": "f", "arguments": {"a": 1}}', "events": called("f", '{"a": 1}')},
    {
        "text": '<think>Hm.</think>\n\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
        "events": [*thought("Hm."), *called("get_time", "{}")],
    },
    {  # Apriel and MiniMax M1: all in one section
        "text": '<tool_calls>[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]</tool_calls>'
        '<tool_calls>\n{"name": "f", "arguments": {}}\n{"name": "g", "arguments": {}}\n</tool_calls>',
        "events": [*called("f", "{}"), *called("g", "{}", 1), *called("f", "{}", 2), *called("g", "{}", 3)],
    },
]


def create(tools: list[dict[str, Any]] | None) -> TableParser:
    return TableParser(DIALECT, tools)


@hookimpl
def infer_parsers() -> list[ParserSpec]:
    return [
        ParserSpec(
            name="hermes",
            api=API_VERSION,
            factory=f"{__name__}:create",
            fingerprints=("<tool_call>", "<tool_calls>"),
            **DIALECT.spec_fields(),
            call_syntaxes=(SYNTAX,),
            example={"transcripts": TRANSCRIPTS},
        )
    ]
