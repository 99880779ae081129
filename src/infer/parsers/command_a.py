"""Command R7B and Command A: marked thinking, a JSON list as action, a marked response with citations."""

from __future__ import annotations

from typing import Any

from infer.plugins import ParserSpec, hookimpl
from infer.plugins.parser import API_VERSION
from infer.plugins.parsing import Dialect, JsonCalls, Reasoning, TableParser, called, said, thought

DIALECT = Dialect(
    reasoning=Reasoning(start=("<|START_THINKING|>",), end=("<|END_THINKING|>",)),
    calls=(
        JsonCalls(
            openers=("<|START_ACTION|>",),
            closers=("<|END_ACTION|>",),
            name_keys=("tool_name", "name"),
        ),
    ),
    dropped=(
        "<|START_RESPONSE|>",
        "<|END_RESPONSE|>",
        "<|START_TEXT|>",
        "<|END_TEXT|>",
        "<|END_OF_TURN_TOKEN|>",
        "<co>",
    ),
    dropped_spans=(("</co:", ">"),),
)
TRANSCRIPTS: list[dict[str, Any]] = [
    {
        "text": "<|START_THINKING|>I call both.<|END_THINKING|><|START_ACTION|>\n[\n"
        '    {"tool_call_id": "0", "tool_name": "foo", '
        '"parameters": {"query": "q"}},\n    {"tool_call_id": "1", "tool_name": "bar", '
        '"parameters": {"x": 42}}\n]\n<|END_ACTION|>',
        "events": [
            *thought("I call both."),
            *called("foo", '{"query": "q"}', call_id="0"),
            *called("bar", '{"x": 42}', 1, call_id="1"),
        ],
    },
    {
        "text": "<|START_THINKING|>A <co>rainbow</co: 0:[1]>.<|END_THINKING|>"
        "<|START_RESPONSE|>foo <co>bar</co: 0:[1,2],1:[3,4]>!<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
        "events": [*thought("A rainbow."), *said("foo bar!")],
    },
    {"text": "<|START_RESPONSE|><code>a</code> b </co: 0", "events": said("<code>a</code> b </co: 0")},
    {"text": "<|START_ACTION|>[oops]<|END_ACTION|>", "events": said("<|START_ACTION|>[oops]<|END_ACTION|>")},
]


def create(tools: list[dict[str, Any]] | None) -> TableParser:
    return TableParser(DIALECT, tools)


@hookimpl
def infer_parsers() -> list[ParserSpec]:
    return [
        ParserSpec(
            name="command_a",
            api=API_VERSION,
            factory=f"{__name__}:create",
            fingerprints=("<|START_ACTION|>",),
            **DIALECT.spec_fields(),
            example={"transcripts": TRANSCRIPTS},
        )
    ]
