"""LFM2: a list of Python calls between tool call marks."""

from __future__ import annotations

from typing import Any

from infer.plugins import ParserSpec, hookimpl
from infer.plugins.parser import API_VERSION
from infer.plugins.parsing import Dialect, PythonCalls, Reasoning, TableParser, called, said, thought

DIALECT = Dialect(
    reasoning=Reasoning(),
    calls=(
        PythonCalls(
            openers=("<|tool_call_start|>",),
            closers=("<|tool_call_end|>",),
            listed=False,
        ),
    ),
    dropped=("<|im_end|>",),
)
TRANSCRIPTS: list[dict[str, Any]] = [
    {"text": "<think>A</think>B", "events": [*thought("A"), *said("B")]},
    {
        "text": '<|tool_call_start|>[get_weather(city="Oslo"), get_time()]<|tool_call_end|>Checking.<|im_end|>',
        "events": [*called("get_weather", '{"city": "Oslo"}'), *called("get_time", "{}", 1), *said("Checking.")],
    },
    {"text": "<|tool_call_start|>[oops]", "events": said("<|tool_call_start|>[oops]")},
]


def create(tools: list[dict[str, Any]] | None) -> TableParser:
    return TableParser(DIALECT, tools)


@hookimpl
def infer_parsers() -> list[ParserSpec]:
    return [
        ParserSpec(
            name="lfm2",
            api=API_VERSION,
            factory=f"{__name__}:create",
            fingerprints=("<|tool_list_start|>", "<|tool_call_start|>", "List of tools: ["),
            **DIALECT.spec_fields(),
            example={"transcripts": TRANSCRIPTS},
        )
    ]
