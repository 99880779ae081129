"""DeepSeek R1: always reasons, whether or not a tag opens it; calls as in DeepSeek V3."""

from __future__ import annotations

from typing import Any

from infer.plugins import ParserSpec, hookimpl
from infer.plugins.parser import API_VERSION, CallSyntax
from infer.plugins.parsing import Dialect, HeaderCalls, Reasoning, TableParser, called, said, thought

DIALECT = Dialect(
    reasoning=Reasoning(implied="always"),
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
    {"text": "A</think>B", "events": [*thought("A"), *said("B")]},
    {"text": "A</think>", "events": thought("A")},
    {"text": "A", "events": thought("A")},
    {"text": "<think>A", "events": thought("A")},
    {"text": "</think>B", "events": said("B")},
    {"text": "", "events": []},
    {"text": "<think>This\nThat</think>The rest\nThat", "events": [*thought("This\nThat"), *said("The rest\nThat")]},
    {"text": "\n<think>A</think>\nB", "events": [*thought("A"), *said("\nB")]},
    {"text": "A</thin</think>B</think>C", "events": [*thought("A</thin"), *said("B</think>C")]},
    {"text": "A</think>B", "prompt": "<｜Assistant｜><think>\n", "events": [*thought("A"), *said("B")]},
    {"text": "B", "prompt": "<｜Assistant｜><think>\n\n</think>\n\n", "events": said("B")},
    {
        "text": "Look.\n</think>\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
        'get_weather\n```json\n{"city": "Oslo"}\n```<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n```json\n{}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
        "events": [*thought("Look.\n"), *called("get_weather", '{"city": "Oslo"}'), *called("get_time", "{}", 1)],
    },
    {  # a call ends the reasoning
        "text": "<think>Look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n"
        "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "events": [*thought("Look."), *called("get_time", "{}")],
    },
]


def create(tools: list[dict[str, Any]] | None) -> TableParser:
    return TableParser(DIALECT, tools)


@hookimpl
def infer_parsers() -> list[ParserSpec]:
    return [
        ParserSpec(
            name="deepseek_r1",
            api=API_VERSION,
            factory=f"{__name__}:create",
            fingerprints=("<｜tool▁calls▁begin｜>…<｜tool▁sep｜>…```json…think>",),
            **DIALECT.spec_fields(),
            call_syntaxes=(SYNTAX,),
            example={"transcripts": TRANSCRIPTS},
        )
    ]
