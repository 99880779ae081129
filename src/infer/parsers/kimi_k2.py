"""Kimi K2: calls in a section, each with an id that holds its name; reasoning in <think> tags."""

from __future__ import annotations

from typing import Any

from infer.plugins import ParserSpec, hookimpl
from infer.plugins.parser import API_VERSION
from infer.plugins.parsing import Dialect, HeaderCalls, Reasoning, TableParser, called, cut, said, thought

DIALECT = Dialect(
    reasoning=Reasoning(start=("<think>", "◁think▷"), end=("</think>", "◁/think▷")),
    calls=(
        HeaderCalls(
            section_open=("<|tool_calls_section_begin|>",),
            section_close=("<|tool_calls_section_end|>",),
            call_open=("<|tool_call_begin|>",),
            name=r"(?:functions\.)?(?P<name>[\w.\-]+):\d+",
            header_is_id=True,
            name_end=("<|tool_call_argument_begin|>",),
            call_close=("<|tool_call_end|>",),
        ),
    ),
    dropped=("<|im_end|>",),
)
TRANSCRIPTS: list[dict[str, Any]] = [
    {
        "text": "I'll check. <|tool_calls_section_begin|><|tool_call_begin|>"
        "functions.get_weather:0 <|tool_call_argument_begin|>"
        '{"city": "<b>Oslo</b>"}<|tool_call_end|><|tool_call_begin|>get_time:1<|tool_call_argument_begin|>{ }'
        "<|tool_call_end|><|tool_calls_section_end|><|im_end|>",
        "events": [
            *said("I'll check. "),
            *called("get_weather", '{"city": "<b>Oslo</b>"}', call_id="functions.get_weather:0"),
            *called("get_time", "{ }", 1, call_id="get_time:1"),
        ],
    },
    {
        "text": "<think>Look<|tool_calls_section_begin|><|tool_call_begin|>functions.f:2<|tool_call_argument_begin|>{}"
        "<|tool_call_end|><|tool_calls_section_end|>",
        "events": [*thought("Look"), *called("f", "{}", call_id="functions.f:2")],
    },
    {  # an id without a number is none; the next call is read
        "text": "<|tool_calls_section_begin|><|tool_call_begin|>"
        "functions.bad.0 <|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_call_begin|>functions.f:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        "events": [
            *said(
                "<|tool_calls_section_begin|><|tool_call_begin|>functions.bad.0 "
                "<|tool_call_argument_begin|>{}<|tool_call_end|>"
            ),
            *called("f", "{}", call_id="functions.f:1"),
        ],
    },
    {  # arguments that end too early
        "text": "<|tool_calls_section_begin|><|tool_call_begin|>"
        'functions.f:0<|tool_call_argument_begin|>{"a": "b"<|tool_call_end|>'
        "<|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        "events": [
            *cut("f", '{"a": "b"', call_id="functions.f:0"),
            *called("g", "{}", 1, call_id="functions.g:1"),
        ],
    },
]


def create(tools: list[dict[str, Any]] | None) -> TableParser:
    return TableParser(DIALECT, tools)


@hookimpl
def infer_parsers() -> list[ParserSpec]:
    return [
        ParserSpec(
            name="kimi_k2",
            api=API_VERSION,
            factory=f"{__name__}:create",
            fingerprints=("<|tool_calls_section_begin|>",),
            **DIALECT.spec_fields(),
            example={"transcripts": TRANSCRIPTS},
        )
    ]
