"""DeepSeek V3: calls in a section, name and fenced JSON between marks; no reasoning."""

from __future__ import annotations

from typing import Any

from infer.plugins import ParserSpec, hookimpl
from infer.plugins.parser import API_VERSION, CallSyntax
from infer.plugins.parsing import Dialect, HeaderCalls, TableParser, called, said

DIALECT = Dialect(
    calls=(
        HeaderCalls(
            section_open=("<｜tool▁calls▁begin｜>",),
            section_close=("<｜tool▁calls▁end｜>",),
            call_open=("<｜tool▁call▁begin｜>",),
            before_name=("function<｜tool▁sep｜>",),
            before_arguments="```json",
            after_arguments="```",
            call_close=("<｜tool▁call▁end｜>",),
        ),
    ),
    dropped=("<｜end▁of▁sentence｜>",),
)
SYNTAX = CallSyntax(
    section_begin="<｜tool▁calls▁begin｜>",
    before_name="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    before_arguments="\n```json\n",
    end="\n```<｜tool▁call▁end｜>",
    separator="\n",
    section_end="<｜tool▁calls▁end｜>",
    trigger="<｜tool▁calls▁begin｜>",
    excludes=("<｜tool▁call▁begin｜>",),
)
TRANSCRIPTS: list[dict[str, Any]] = [
    {
        "text": "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        '```json\n{"city": "Oslo"}\n```<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "events": [*said("I look."), *called("get_weather", '{"city": "Oslo"}'), *called("get_time", "{}", 1)],
    },
    {
        "text": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{bad}\n"
        "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "events": said(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{bad}\n"
            "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
    },
    {"text": "<think> is no mark here", "events": said("<think> is no mark here")},
]


def create(tools: list[dict[str, Any]] | None) -> TableParser:
    return TableParser(DIALECT, tools)


@hookimpl
def infer_parsers() -> list[ParserSpec]:
    return [
        ParserSpec(
            name="deepseek_v3",
            api=API_VERSION,
            factory=f"{__name__}:create",
            fingerprints=("<｜tool▁calls▁begin｜>…```json",),
            **DIALECT.spec_fields(),
            call_syntaxes=(SYNTAX,),
            example={"transcripts": TRANSCRIPTS},
        )
    ]
