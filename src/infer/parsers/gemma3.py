"""Gemma 3: Python calls in a tool_code block, or a list of them as the whole answer."""

from __future__ import annotations

from typing import Any

from infer.plugins import ParserSpec, hookimpl
from infer.plugins.parser import API_VERSION
from infer.plugins.parsing import SAMPLE_TOOLS, Dialect, PythonCalls, TableParser, called, said

DIALECT = Dialect(
    calls=(
        PythonCalls(openers=("```tool_code\n",), closers=("```",), listed=False),
        PythonCalls(openers=("[",), bare=True, only_first=True),
    ),
    dropped=("<end_of_turn>",),
)
TRANSCRIPTS: list[dict[str, Any]] = [
    {
        "text": 'I look.\n```tool_code\nget_weather(city="Oslo", days=2)\n```<end_of_turn>',
        "events": [*said("I look.\n"), *called("get_weather", '{"city": "Oslo", "days": 2}')],
    },
    {
        "text": "```tool_code\n[get_time(), get_weather(city='Oslo')]\n```",
        "events": [*called("get_time", "{}"), *called("get_weather", '{"city": "Oslo"}', 1)],
    },
    {
        "text": '```tool_code\nget_time()\nget_weather(city="""Oslo""")\n```\nDone.',
        "events": [*called("get_time", "{}"), *called("get_weather", '{"city": "Oslo"}', 1), *said("\nDone.")],
    },
    {"text": "[get_time()]", "events": called("get_time", "{}"), "tools": SAMPLE_TOOLS},
    {"text": "```tool_code\nx = 1\n```", "events": said("```tool_code\nx = 1\n```")},
]


def create(tools: list[dict[str, Any]] | None) -> TableParser:
    return TableParser(DIALECT, tools)


@hookimpl
def infer_parsers() -> list[ParserSpec]:
    return [
        ParserSpec(
            name="gemma3",
            api=API_VERSION,
            factory=f"{__name__}:create",
            fingerprints=("<start_of_turn>model",),
            **DIALECT.spec_fields(),
            example={"transcripts": TRANSCRIPTS},
        )
    ]
