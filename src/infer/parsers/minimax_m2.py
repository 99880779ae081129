"""MiniMax M2: invocations with named parameters in one section, reasoning that the template opens."""

from __future__ import annotations

from typing import Any

from infer.plugins import ParserSpec, hookimpl
from infer.plugins.parser import API_VERSION
from infer.plugins.parsing import SAMPLE_TOOLS, Dialect, Reasoning, TableParser, XmlCalls, called, cut, said, thought

DIALECT = Dialect(
    reasoning=Reasoning(implied="always"),
    calls=(
        XmlCalls(
            section_open=("<minimax:tool_call>",),
            section_close=("</minimax:tool_call>",),
            call_open=('<invoke name="',),
            name_end='">',
            key_open='<parameter name="',
            key_end=('">',),
            value_end="</parameter>",
            call_close="</invoke>",
        ),
    ),
    dropped=("[e~[",),
)
TRANSCRIPTS: list[dict[str, Any]] = [
    {"text": "Sum.\n</think>\n\n4", "events": [*thought("Sum.\n"), *said("\n\n4")]},
    {"text": "<think>Sum.</think>4[e~[", "events": [*thought("Sum."), *said("4")]},
    {
        "text": 'Two.\n</think>\n\n<minimax:tool_call>\n<invoke name="get_weather">\n'
        '<parameter name="city">Oslo</parameter>'
        '\n<parameter name="days">2</parameter>\n</invoke>\n<invoke name="get_time">\n</invoke>\n</minimax:tool_call>',
        "events": [
            *thought("Two.\n"),
            *called("get_weather", '{"city": "Oslo", "days": 2}'),
            *called("get_time", "{}", 1),
        ],
        "tools": SAMPLE_TOOLS,
    },
    {
        "text": "</think><minimax:tool_call>oops</minimax:tool_call>",
        "events": said("<minimax:tool_call>oops</minimax:tool_call>"),
    },
    {
        "text": '</think><minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Os',
        "events": cut("get_weather", '{"city": "Os'),
        "tools": SAMPLE_TOOLS,
    },
]


def create(tools: list[dict[str, Any]] | None) -> TableParser:
    return TableParser(DIALECT, tools)


@hookimpl
def infer_parsers() -> list[ParserSpec]:
    return [
        ParserSpec(
            name="minimax_m2",
            api=API_VERSION,
            factory=f"{__name__}:create",
            fingerprints=("<minimax:tool_call>…<invoke name=",),
            **DIALECT.spec_fields(),
            example={"transcripts": TRANSCRIPTS},
        )
    ]
