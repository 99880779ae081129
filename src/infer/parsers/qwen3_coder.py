"""Qwen3-Coder, Qwen3.5, Nemotron 3, Step 3.5: arguments tagged one by one; reasoning in <think> tags if at all."""

from __future__ import annotations

from typing import Any

from infer.plugins import ParserSpec, hookimpl
from infer.plugins.parser import API_VERSION
from infer.plugins.parsing import SAMPLE_TOOLS, Dialect, Reasoning, TableParser, XmlCalls, called, cut, said, thought

DIALECT = Dialect(
    reasoning=Reasoning(),
    calls=(
        XmlCalls(
            section_open=("<tool_call>",),
            section_close=("</tool_call>",),
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
    dropped=("<|im_end|>",),
)
TRANSCRIPTS: list[dict[str, Any]] = [
    {
        "text": "I look.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nNew York\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call><|im_end|>",
        "events": [*said("I look.\n\n"), *called("get_weather", '{"city": "New York", "days": 3}')],
        "tools": SAMPLE_TOOLS,
    },
    {  # every declared type, and a value in several lines with quotes and marks
        "text": '<tool_call>\n<function=get_weather>\n<parameter=city>\na "b" </param>\n\n  c\n\n</parameter>\n'
        "<parameter=days>\n3.0\n</parameter>\n<parameter=limit>\n1e2\n</parameter>\n<parameter=detailed>\nTrue\n"
        "</parameter>\n<parameter=tags>\n['x', 'y']\n</parameter>\n<parameter=where>\n{\"a\": [1]}\n</parameter>\n"
        "<parameter=note>\nnull\n</parameter>\n</function>\n</tool_call>",
        "events": called(
            "get_weather",
            '{"city": "a \\"b\\" </param>\\n\\n  c\\n", "days": 3, "limit": 1e2, "detailed": true, "tags": ["x", "y"], '
            '"where": {"a": [1]}, "note": null}',
        ),
        "tools": SAMPLE_TOOLS,
    },
    {  # values that are not of the declared type stay what they were
        "text": "<tool_call><function=get_weather><parameter=days>many</parameter><parameter=city>12</parameter>"
        "<parameter=note>12</parameter></function></tool_call>",
        "events": called("get_weather", '{"days": "many", "city": "12", "note": "12"}'),
        "tools": SAMPLE_TOOLS,
    },
    {  # without a schema JSON is JSON
        "text": "<tool_call><function=f><parameter=a>1</parameter><parameter=b>x y</parameter></function></tool_call>",
        "events": called("f", '{"a": 1, "b": "x y"}'),
    },
    {
        "text": "<tool_call>\n<function=get_time>\n</function>\n</tool_call>"
        "\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
        "events": [*called("get_time", "{}"), *called("get_time", "{}", 1)],
    },
    {  # the tags around, and the ends of values, that models forget
        "text": "<function=get_weather>\n<parameter=city>\nOslo\n<parameter=days>\n2\n</function>",
        "events": called("get_weather", '{"city": "Oslo", "days": 2}'),
        "tools": SAMPLE_TOOLS,
    },
    {"text": "<function=oops and <tool_call> too", "events": said("<function=oops and <tool_call> too")},
    {
        "text": "<tool_call>\n<function=get_weather>\n<parameter=city>\nOs",
        "events": cut("get_weather", '{"city": "Os'),
        "tools": SAMPLE_TOOLS,
    },
    {
        "text": "<tool_call>\n<function=get_weather>\n<parameter=days>\n12",
        "events": [*cut("get_weather", ""), *said("<parameter=days>\n12")],
        "tools": SAMPLE_TOOLS,
    },
    {
        "text": "<think>Hm.\n</think>\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
        "events": [*thought("Hm.\n"), *called("get_time", "{}")],
    },
    {
        "text": "Hm.</think>Hello",
        "prompt": "<|im_start|>assistant\n<think>\n",
        "events": [*thought("Hm."), *said("Hello")],
    },
]


def create(tools: list[dict[str, Any]] | None) -> TableParser:
    return TableParser(DIALECT, tools)


@hookimpl
def infer_parsers() -> list[ParserSpec]:
    return [
        ParserSpec(
            name="qwen3_coder",
            api=API_VERSION,
            factory=f"{__name__}:create",
            fingerprints=("<tool_call>…<function=…<parameter=",),
            **DIALECT.spec_fields(),
            example={"transcripts": TRANSCRIPTS},
        )
    ]
