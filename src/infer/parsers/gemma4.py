"""Gemma 4: call:NAME{...} between tool call marks; reasoning in a thought channel."""

from __future__ import annotations

from typing import Any

from infer.plugins import ParserSpec, hookimpl
from infer.plugins.parser import API_VERSION
from infer.plugins.parsing import SAMPLE_TOOLS, Dialect, GemmaCalls, Reasoning, TableParser, called, said, thought

DIALECT = Dialect(
    reasoning=Reasoning(start=("<|channel>thought\n", "<|channel>thought"), end=("<channel|>",)),
    calls=(GemmaCalls(openers=("<|tool_call>",), closers=("<tool_call|>",), quote='<|"|>'),),
    dropped=("<turn|>", "<|tool_response>"),
)
TRANSCRIPTS: list[dict[str, Any]] = [
    {
        "text": '<|channel>thought\nLook.<channel|><|tool_call>call:get_weather{city:<|"|>Oslo<|"|>'
        ",days:2}<tool_call|><|tool_response>",
        "events": [*thought("Look."), *called("get_weather", '{"city": "Oslo", "days": 2}')],
        "tools": SAMPLE_TOOLS,
    },
    {"text": "<|channel>thought\n<channel|>Hi<turn|>", "events": said("Hi")},
    {"text": "<|tool_call>oops<tool_call|>", "events": said("<|tool_call>oops<tool_call|>")},
]


def create(tools: list[dict[str, Any]] | None) -> TableParser:
    return TableParser(DIALECT, tools)


@hookimpl
def infer_parsers() -> list[ParserSpec]:
    return [
        ParserSpec(
            name="gemma4",
            api=API_VERSION,
            factory=f"{__name__}:create",
            fingerprints=("<|tool_call>",),
            **DIALECT.spec_fields(),
            example={"transcripts": TRANSCRIPTS},
        )
    ]
