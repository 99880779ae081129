"""InternLM 2 and 2.5: one JSON call between action marks."""

from __future__ import annotations

from typing import Any

from infer.plugins import ParserSpec, hookimpl
from infer.plugins.parser import API_VERSION, CallSyntax
from infer.plugins.parsing import Dialect, JsonCalls, TableParser, called, said

DIALECT = Dialect(
    calls=(
        JsonCalls(
            openers=("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>"),
            closers=("<|action_end|>",),
            argument_keys=("parameters", "arguments"),
        ),
    ),
    dropped=("<|im_end|>",),
)
SYNTAX = CallSyntax(
    before_name='<|action_start|><|plugin|>\n{"name": "',
    before_arguments='", "parameters": ',
    end="}<|action_end|>",
    separator="\n",
    trigger="<|action_start|>",
)
TRANSCRIPTS: list[dict[str, Any]] = [
    {
        "text": 'Let me check. <|action_start|><|plugin|>\n{"name": "get_weather", '
        '"parameters": {"city": "Tokyo"}}<|action_end|>\n',
        "events": [*said("Let me check. "), *called("get_weather", '{"city": "Tokyo"}')],
    },
    {
        "text": '<|action_start|> <|plugin|>{"name": "f", "parameters": {}}<|action_end|><|im_end|>',
        "events": called("f", "{}"),
    },
    {"text": '<|action_start|>{"name": "f"}', "events": said('<|action_start|>{"name": "f"}')},
    {
        "text": "<|action_start|><|plugin|>not json<|action_end|>",
        "events": said("<|action_start|><|plugin|>not json<|action_end|>"),
    },
]


def create(tools: list[dict[str, Any]] | None) -> TableParser:
    return TableParser(DIALECT, tools)


@hookimpl
def infer_parsers() -> list[ParserSpec]:
    return [
        ParserSpec(
            name="internlm",
            api=API_VERSION,
            factory=f"{__name__}:create",
            fingerprints=("<|action_start|>", "<|plugin|>"),
            **DIALECT.spec_fields(),
            call_syntaxes=(SYNTAX,),
            example={"transcripts": TRANSCRIPTS},
        )
    ]
