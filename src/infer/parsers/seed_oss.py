"""ByteDance Seed-OSS: Qwen3-Coder's call tags under its own names, reasoning in <seed:think> tags."""

from __future__ import annotations

from typing import Any

from infer.plugins import ParserSpec, hookimpl
from infer.plugins.parser import API_VERSION
from infer.plugins.parsing import SAMPLE_TOOLS, Dialect, Reasoning, TableParser, XmlCalls, called, said, thought

DIALECT = Dialect(
    reasoning=Reasoning(start=("<seed:think>",), end=("</seed:think>",)),
    calls=(
        XmlCalls(
            section_open=("<seed:tool_call>",),
            section_close=("</seed:tool_call>",),
            call_open=("<function=",),
            name_end=">",
            key_open="<parameter=",
            key_end=(">",),
            value_end="</parameter>",
            value_end_missing=("<parameter=", "</function>"),
            trim_line=True,
            call_close="</function>",
        ),
    ),
    dropped_spans=(("<seed:cot_budget_reflect>", "</seed:cot_budget_reflect>"),),
    dropped=("<seed:eos>",),
)
TRANSCRIPTS: list[dict[str, Any]] = [
    {
        "text": "<seed:think>Got it.<seed:cot_budget_reflect>100 used.</seed:cot_budget_reflect>"
        " Go.</seed:think>Hi<seed:eos>",
        "events": [*thought("Got it. Go."), *said("Hi")],
    },
    {
        "text": "<seed:think>\nOslo.\n</seed:think>\n<seed:tool_call>\n<function=get_weather>\n"
        "<parameter=city>Oslo</parameter>\n"
        "<parameter=days>2</parameter>\n</function>\n</seed:tool_call>",
        "events": [*thought("\nOslo.\n"), *called("get_weather", '{"city": "Oslo", "days": 2}')],
        "tools": SAMPLE_TOOLS,
    },
    {"text": "<seed:cot_budget_reflect>never\nclosed", "events": said("<seed:cot_budget_reflect>never\nclosed")},
]


def create(tools: list[dict[str, Any]] | None) -> TableParser:
    return TableParser(DIALECT, tools)


@hookimpl
def infer_parsers() -> list[ParserSpec]:
    return [
        ParserSpec(
            name="seed_oss",
            api=API_VERSION,
            factory=f"{__name__}:create",
            fingerprints=("<seed:think>",),
            **DIALECT.spec_fields(),
            example={"transcripts": TRANSCRIPTS},
        )
    ]
