"""An output parser: calls as JSON between <my-name> and </my-name>, thoughts between <think> and </think>.

Runs in the request's task, one parser per choice. A format is a table; the streaming machine behind it is infer's.
"""

from __future__ import annotations

from typing import Any

from infer.plugins import CallSyntax, ParserSpec, hookimpl
from infer.plugins.parsing import Dialect, JsonCalls, Reasoning, TableParser, called, cut, said, thought

OPEN, CLOSE = "<my-name>", "</my-name>"
DIALECT = Dialect(
    reasoning=Reasoning(start=("<think>",), end=("</think>",)),
    calls=(JsonCalls(openers=(OPEN,), closers=(CLOSE,)),),
    dropped=("<|im_end|>",),  # marks that say nothing to the reader
)
SYNTAX = CallSyntax(  # how a grammar may write a call, so that a model can be held to it
    before_name=OPEN + '{"name": "',
    before_arguments='", "arguments": ',
    end="}" + CLOSE,
    trigger=OPEN,
)
TRANSCRIPTS: list[dict[str, Any]] = [
    {"text": "Just an answer, 1 < 2.", "events": said("Just an answer, 1 < 2.")},
    {
        "text": '<think>Hm.</think>I look.<my-name>{"name": "get_weather", "arguments": {"city": "Oslo"}}</my-name><|im_end|>',
        "events": [*thought("Hm."), *said("I look."), *called("get_weather", '{"city": "Oslo"}')],
    },
    {"text": '<my-name>{"name": "f", "arguments": {"a": "cut o', "events": cut("f", '{"a": "cut o')},
    {"text": "<my-name>no JSON</my-name>", "events": said("<my-name>no JSON</my-name>")},
]
"""What a model may say, and what is understood. The kit feeds each in every split, cut off and damaged."""


def create(tools: list[dict[str, Any]] | None) -> TableParser:
    return TableParser(DIALECT, tools)


@hookimpl
def infer_parsers() -> list[ParserSpec]:
    return [
        ParserSpec(
            name="my-name",
            api=1,
            factory=f"{__name__}:create",
            fingerprints=(OPEN,),  # models whose chat template has this text get the parser
            **DIALECT.spec_fields(),
            call_syntaxes=(SYNTAX,),
            example={"transcripts": TRANSCRIPTS},
        )
    ]
