"""DeepSeek V3.1: calls in a section, name and plain JSON between marks; reasoning where the template opens it."""

from __future__ import annotations

from typing import Any

from infer.plugins import ParserSpec, hookimpl
from infer.plugins.parser import API_VERSION, CallSyntax
from infer.plugins.parsing import Dialect, HeaderCalls, Reasoning, TableParser, called, cut, said, thought

DIALECT = Dialect(
    reasoning=Reasoning(),
    calls=(
        HeaderCalls(
            section_open=("<｜tool▁calls▁begin｜>",),
            section_close=("<｜tool▁calls▁end｜>",),
            call_open=("<｜tool▁call▁begin｜>",),
            name_end=("<｜tool▁sep｜>",),
            call_close=("<｜tool▁call▁end｜>",),
        ),
    ),
    dropped=("<｜end▁of▁sentence｜>",),
)
SYNTAX = CallSyntax(
    section_begin="<｜tool▁calls▁begin｜>",
    before_name="<｜tool▁call▁begin｜>",
    before_arguments="<｜tool▁sep｜>",
    end="<｜tool▁call▁end｜>",
    section_end="<｜tool▁calls▁end｜>",
    trigger="<｜tool▁calls▁begin｜>",
    excludes=("<｜tool▁call▁begin｜>",),
)
TRANSCRIPTS: list[dict[str, Any]] = [
    {
        "text": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"city": "Oslo"}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "events": [*called("get_weather", '{"city": "Oslo"}'), *called("get_time", "{}", 1)],
    },
    {"text": "A</think>B", "prompt": "<｜Assistant｜><think>", "events": [*thought("A"), *said("B")]},
    {"text": "B", "prompt": "<｜Assistant｜></think>", "events": said("B")},
    {
        "text": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "cut',
        "events": cut("f", '{"a": "cut'),
    },
    {"text": "<｜tool▁calls▁begin｜>no call", "events": said("<｜tool▁calls▁begin｜>no call")},
]


def create(tools: list[dict[str, Any]] | None) -> TableParser:
    return TableParser(DIALECT, tools)


@hookimpl
def infer_parsers() -> list[ParserSpec]:
    return [
        ParserSpec(
            name="deepseek_v31",
            api=API_VERSION,
            factory=f"{__name__}:create",
            fingerprints=("<｜tool▁calls▁begin｜>…<｜tool▁sep｜>…<think>",),
            **DIALECT.spec_fields(),
            call_syntaxes=(SYNTAX,),
            example={"transcripts": TRANSCRIPTS},
        )
    ]
