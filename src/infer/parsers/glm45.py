"""GLM 4.5 to 4.7: name and tagged key-value pairs between <tool_call> tags, reasoning in <think> tags."""

from __future__ import annotations

from typing import Any

from infer.plugins import ParserSpec, hookimpl
from infer.plugins.parser import API_VERSION
from infer.plugins.parsing import SAMPLE_TOOLS, Dialect, Reasoning, TableParser, XmlCalls, called, cut, said, thought

DIALECT = Dialect(
    reasoning=Reasoning(),
    calls=(
        XmlCalls(
            call_open=("<tool_call>",),
            key_open="<arg_key>",
            key_end=("</arg_key>",),
            value_open="<arg_value>",
            value_end="</arg_value>",
            call_close="</tool_call>",
        ),
    ),
    dropped=("<|observation|>", "<|user|>"),
)
TRANSCRIPTS: list[dict[str, Any]] = [
    {
        "text": "I look. <tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Dallas</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        "events": [*said("I look. "), *called("get_weather", '{"city": "Dallas", "days": 3}')],
        "tools": SAMPLE_TOOLS,
    },
    {
        "text": "<think>Two.</think>\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>"
        "北京\n市</arg_value>\n</tool_call>"
        "\n<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call><|observation|>",
        "events": [
            *thought("Two."),
            *called("get_weather", '{"city": "北京\\n市"}'),
            *called("get_weather", '{"city": "Oslo"}', 1),
        ],
        "tools": SAMPLE_TOOLS,
    },
    {  # indented, as in published examples
        "text": "<tool_call>get_weather\n    <arg_key>city</arg_key>\n    <arg_value>"
        "Oslo</arg_value>\n    </tool_call>",
        "events": called("get_weather", '{"city": "Oslo"}'),
        "tools": SAMPLE_TOOLS,
    },
    {"text": "<tool_call>get_time\n</tool_call>", "events": called("get_time", "{}")},
    {
        "text": '<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{"k": [1]}</arg_value>\n<arg_key>b</arg_key>\n'
        "<arg_value>plain {</arg_value>\n</tool_call>",
        "events": called("f", '{"a": {"k": [1]}, "b": "plain {"}'),
    },
    {  # a key that is not closed
        "text": "<tool_call>f\n<arg_key>a\n<arg_value>1</arg_value>\n</tool_call>",
        "events": [*cut("f", ""), *said("<arg_key>a\n<arg_value>1</arg_value>\n</tool_call>")],
    },
    {
        "text": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Beij",
        "events": cut("get_weather", '{"city": "Beij'),
        "tools": SAMPLE_TOOLS,
    },
    {"text": "<tool_call>not a call</tool_call>", "events": said("<tool_call>not a call</tool_call>")},
    {
        "text": "never opened</think>\n<tool_call>get_time</tool_call>",
        "prompt": "<|assistant|>\n<think>",
        "events": [*thought("never opened"), *called("get_time", "{}")],
    },
]


def create(tools: list[dict[str, Any]] | None) -> TableParser:
    return TableParser(DIALECT, tools)


@hookimpl
def infer_parsers() -> list[ParserSpec]:
    return [
        ParserSpec(
            name="glm45",
            api=API_VERSION,
            factory=f"{__name__}:create",
            fingerprints=("<arg_key>…<arg_value>",),
            **DIALECT.spec_fields(),
            example={"transcripts": TRANSCRIPTS},
        )
    ]
