"""Models that reason in <think> tags and have no call format that we know."""

from __future__ import annotations

from typing import Any

from infer.plugins import ParserSpec, hookimpl
from infer.plugins.parser import API_VERSION
from infer.plugins.parsing import Dialect, Reasoning, TableParser, said, thought

DIALECT = Dialect(reasoning=Reasoning(), dropped=("<|im_end|>",))
TRANSCRIPTS: list[dict[str, Any]] = [
    {"text": "<think>A</think>B", "events": [*thought("A"), *said("B")]},
    {"text": "A</think>B", "prompt": "assistant\n<think>\n", "events": [*thought("A"), *said("B")]},
    {"text": "A < B <thinking>", "events": said("A < B <thinking>")},
    {"text": "<think>never closed", "events": thought("never closed")},
    {"text": "A<think>B</think>C", "events": [*said("A"), *thought("B"), *said("C")]},
]


def create(tools: list[dict[str, Any]] | None) -> TableParser:
    return TableParser(DIALECT, tools)


@hookimpl
def infer_parsers() -> list[ParserSpec]:
    return [
        ParserSpec(
            name="think",
            api=API_VERSION,
            factory=f"{__name__}:create",
            fingerprints=("<think>", "</think>"),
            **DIALECT.spec_fields(),
            example={"transcripts": TRANSCRIPTS},
        )
    ]
