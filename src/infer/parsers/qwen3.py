"""Qwen3 and QwQ: reasoning in <think> tags that the template may have opened, JSON between <tool_call> tags."""

from __future__ import annotations

from typing import Any

from infer.plugins import ParserSpec, hookimpl
from infer.plugins.parser import API_VERSION, CallSyntax
from infer.plugins.parsing import Dialect, JsonCalls, Reasoning, TableParser, called, said, thought

DIALECT = Dialect(
    reasoning=Reasoning(implied="without_prompt"),
    calls=(JsonCalls(openers=("<tool_call>",), closers=("</tool_call>",)),),
    dropped=("<|im_end|>",),
)
SYNTAX = CallSyntax(
    before_name='<tool_call>\n{"name": "',
    before_arguments='", "arguments": ',
    end="}\n</tool_call>",
    separator="\n",
    trigger="<tool_call>",
)
TRANSCRIPTS: list[dict[str, Any]] = [
    {"text": "<think>\nSum it.\n</think>\n\n4", "events": [*thought("\nSum it.\n"), *said("\n\n4")]},
    {"text": "No tag opened this</think>answer", "events": [*thought("No tag opened this"), *said("answer")]},
    {"text": "<think>never closed", "events": thought("never closed")},
    {"text": "cut off", "events": thought("cut off")},
    {
        "text": "Sum it.</think>4",
        "prompt": "<|im_start|>assistant\n<think>\n",
        "events": [*thought("Sum it."), *said("4")],
    },
    {"text": "4 < 5", "prompt": "<|im_start|>assistant\n<think>\n\n</think>\n\n", "events": said("4 < 5")},
    {"text": "4", "prompt": "<|im_start|>assistant\n", "events": said("4")},
    {"text": "<think>\n\n</think>\n\n4", "prompt": "<|im_start|>assistant\n", "events": said("\n\n4")},
    {
        "text": '<think>I need it.\n</think>\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n'
        "</tool_call>",
        "events": [*thought("I need it.\n"), *called("get_weather", '{"city": "Oslo"}')],
    },
    {  # a call ends reasoning that nothing closed; one that is none does not
        "text": '<think>Try <tool_call> first. <tool_call>{"name": "get_time", "arguments": {}}</tool_call>Done.',
        "events": [*thought("Try <tool_call> first. "), *called("get_time", "{}"), *said("Done.")],
    },
    {
        "text": '<think>a</think><tool_call>{"name": "f", "arguments": {}}</tool_call>\n<think>b</think>c',
        "events": [*thought("a"), *called("f", "{}"), *thought("b"), *said("c")],
    },
]


def create(tools: list[dict[str, Any]] | None) -> TableParser:
    return TableParser(DIALECT, tools)


@hookimpl
def infer_parsers() -> list[ParserSpec]:
    return [
        ParserSpec(
            name="qwen3",
            api=API_VERSION,
            factory=f"{__name__}:create",
            fingerprints=("<tool_call>…</think>",),
            **DIALECT.spec_fields(),
            call_syntaxes=(SYNTAX,),
            example={"transcripts": TRANSCRIPTS},
        )
    ]
