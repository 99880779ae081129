"""DeepSeek V3.2 and V4: DSML invocations whose parameters say whether they are strings, reasoning in <think> tags."""

from __future__ import annotations

from typing import Any

from infer.plugins import ParserSpec, hookimpl
from infer.plugins.parser import API_VERSION
from infer.plugins.parsing import SAMPLE_TOOLS, Dialect, Reasoning, TableParser, XmlCalls, called, said, thought

DIALECT = Dialect(
    reasoning=Reasoning(),
    calls=(
        XmlCalls(
            section_open=("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"),
            section_close=("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"),
            call_open=('<｜DSML｜invoke name="',),
            name_end='">',
            key_open='<｜DSML｜parameter name="',
            key_end=('" string="true">', '" string="false">'),
            string_key_end='" string="true">',
            value_end="</｜DSML｜parameter>",
            call_close="</｜DSML｜invoke>",
        ),
    ),
    dropped=("<｜end▁of▁sentence｜>",),
)
TRANSCRIPTS: list[dict[str, Any]] = [
    {
        "text": 'Look.</think>I look.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">12</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="tags" string="false">["a"]</｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="get_time">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
        "<｜end▁of▁sentence｜>",
        "prompt": "<｜Assistant｜><think>",
        "events": [
            *thought("Look."),
            *said("I look.\n\n"),
            *called("get_weather", '{"city": "12", "tags": ["a"]}'),
            *called("get_time", "{}", 1),
        ],
        "tools": SAMPLE_TOOLS,
    },
    {"text": "<｜DSML｜function_calls>\nno", "events": said("<｜DSML｜function_calls>\nno")},
]


def create(tools: list[dict[str, Any]] | None) -> TableParser:
    return TableParser(DIALECT, tools)


@hookimpl
def infer_parsers() -> list[ParserSpec]:
    return [
        ParserSpec(
            name="deepseek_v32",
            api=API_VERSION,
            factory=f"{__name__}:create",
            fingerprints=("DSML…invoke name=", "invoke name=…DSML", "｜DSML｜"),
            **DIALECT.spec_fields(),
            example={"transcripts": TRANSCRIPTS},
        )
    ]
