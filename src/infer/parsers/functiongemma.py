"""FunctionGemma: call:NAME{...} between function call marks, strings between <escape> marks."""

from __future__ import annotations

from typing import Any

from infer.plugins import ParserSpec, hookimpl
from infer.plugins.parser import API_VERSION
from infer.plugins.parsing import SAMPLE_TOOLS, Dialect, GemmaCalls, TableParser, called, cut, said

DIALECT = Dialect(
    calls=(
        GemmaCalls(
            openers=("<start_function_call>",),
            closers=("<end_function_call>",),
            quote="<escape>",
        ),
    ),
    dropped=("<end_of_turn>", "<start_function_response>"),
)
TRANSCRIPTS: list[dict[str, Any]] = [
    {
        "text": "Let me check. <start_function_call>call:get_weather{city:<escape>San Francisco<escape>,days:3,"
        "tags:[<escape>a<escape>,1],where:{k:true}}<end_function_call><start_function_call>"
        "call:get_time{}<end_function_call>",
        "events": [
            *said("Let me check. "),
            *called("get_weather", '{"city": "San Francisco", "days": 3, "tags": ["a", 1], "where": {"k": true}}'),
            *called("get_time", "{}", 1),
        ],
        "tools": SAMPLE_TOOLS,
    },
    {  # strings are read as the declared type, or as JSON; a comma is missing
        "text": "<start_function_call>call:get_weather{city:<escape>42<escape>days:<escape>"
        "42<escape>,x:<escape>42<escape>}"
        "<end_function_call>",
        "events": called("get_weather", '{"city": "42", "days": 42, "x": 42}'),
        "tools": SAMPLE_TOOLS,
    },
    {
        "text": "<start_function_call>call:get_weather{city:<escape>Os",
        "events": cut("get_weather", '{"city": "Os'),
        "tools": SAMPLE_TOOLS,
    },
    {"text": "<start_function_call>call:f{a:oops}", "events": said("<start_function_call>call:f{a:oops}")},
]


def create(tools: list[dict[str, Any]] | None) -> TableParser:
    return TableParser(DIALECT, tools)


@hookimpl
def infer_parsers() -> list[ParserSpec]:
    return [
        ParserSpec(
            name="functiongemma",
            api=API_VERSION,
            factory=f"{__name__}:create",
            fingerprints=("<start_function_call>", "<start_function_declaration>"),
            **DIALECT.spec_fields(),
            example={"transcripts": TRANSCRIPTS},
        )
    ]
