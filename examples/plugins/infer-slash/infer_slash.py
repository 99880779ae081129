"""A parser for a format that nobody has yet: calls as slash commands, `<|slash|>NAME {...}<|/slash|>`.

Runs in the request's task, one parser per choice. The format is a table; the streaming machine behind it is infer's.
"""

from __future__ import annotations

from typing import Any

from infer.plugins import CallSyntax, ParserSpec, hookimpl
from infer.plugins.parsing import SAMPLE_TOOLS, Dialect, HeaderCalls, Reasoning, TableParser, called, cut, said, thought

OPEN, CLOSE = "<|slash|>", "<|/slash|>"
DIALECT = Dialect(
    reasoning=Reasoning(start=("<|hm|>",), end=("<|so|>",)),
    calls=(HeaderCalls(call_open=(OPEN,), call_close=(CLOSE,)),),
    dropped=("<|end|>",),
)
SYNTAX = CallSyntax(before_name=OPEN, before_arguments=" ", end=CLOSE, trigger=OPEN)
TRANSCRIPTS: list[dict[str, Any]] = [
    {"text": "A / and a <| are no call.", "events": said("A / and a <| are no call.")},
    {
        "text": '<|hm|>Oslo?<|so|>I look.<|slash|>get_weather {"city": "Oslo"}<|/slash|><|slash|>get_time {}<|/slash|><|end|>',
        "events": [
            *thought("Oslo?"),
            *said("I look."),
            *called("get_weather", '{"city": "Oslo"}'),
            *called("get_time", "{}", 1),
        ],
        "tools": SAMPLE_TOOLS,
    },
    {"text": "<|slash|>get_time<|/slash|>", "events": called("get_time", "{}")},
    {"text": '<|slash|>f {"a": "cut o', "events": cut("f", '{"a": "cut o')},
]


def create(tools: list[dict[str, Any]] | None) -> TableParser:
    return TableParser(DIALECT, tools)


@hookimpl
def infer_parsers() -> list[ParserSpec]:
    return [
        ParserSpec(
            name="slash",
            api=1,
            factory=f"{__name__}:create",
            fingerprints=(OPEN,),
            **DIALECT.spec_fields(),
            call_syntaxes=(SYNTAX,),
            example={"transcripts": TRANSCRIPTS},
        )
    ]
