"""Olmo 3: Python calls, one a line, between <function_calls> tags; reasoning in <think> tags."""

from __future__ import annotations

from typing import Any

from infer.plugins import ParserSpec, hookimpl
from infer.plugins.parser import API_VERSION
from infer.plugins.parsing import Dialect, PythonCalls, Reasoning, TableParser, called, said, thought

DIALECT = Dialect(
    reasoning=Reasoning(),
    calls=(
        PythonCalls(
            openers=("<function_calls>",),
            closers=("</function_calls>",),
            listed=False,
        ),
    ),
    dropped=("<|im_end|>",),
)
TRANSCRIPTS: list[dict[str, Any]] = [
    {
        "text": '<think>Two.</think><function_calls>get_weather(city="Oslo")\nget_time()</function_calls>',
        "events": [*thought("Two."), *called("get_weather", '{"city": "Oslo"}'), *called("get_time", "{}", 1)],
    },
    {"text": "<function_calls>\nno\n</function_calls>", "events": said("<function_calls>\nno\n</function_calls>")},
]


def create(tools: list[dict[str, Any]] | None) -> TableParser:
    return TableParser(DIALECT, tools)


@hookimpl
def infer_parsers() -> list[ParserSpec]:
    return [
        ParserSpec(
            name="olmo3",
            api=API_VERSION,
            factory=f"{__name__}:create",
            fingerprints=("<function_calls>",),
            **DIALECT.spec_fields(),
            example={"transcripts": TRANSCRIPTS},
        )
    ]
