"""Transcripts that leaves bring: events in short form, a tool to call, and the joining of pieces. Pure, any thread."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from infer.plugins.parser import ParserEvent

Line = list[str | int]
"""[kind, text, call_index], or with the call's own id as a fourth."""

SAMPLE_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "limit": {"type": "number"},
                    "detailed": {"type": "boolean"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "where": {"type": "object"},
                    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}},
]


def said(text: str) -> list[Line]:
    """Text that the reader sees."""
    return [["text", text, 0]]


def thought(text: str) -> list[Line]:
    """A piece of reasoning."""
    return [["reasoning", text, 0]]


def called(name: str, arguments: str, index: int = 0, call_id: str = "") -> list[Line]:
    """A complete call."""
    return [*cut(name, arguments, index, call_id), ["tool_end", "", index]]


def cut(name: str, arguments: str, index: int = 0, call_id: str = "") -> list[Line]:
    """A call that was cut off or broke after these arguments, as far as they could be read: "" of none. What could not be read
    follows as text: `[*cut("f", ""), *said("the rest")]`."""
    start: Line = ["tool_start", name, index, call_id] if call_id else ["tool_start", name, index]
    return [start, ["tool_args", arguments, index]] if arguments else [start]


def merge_events(events: Iterable[ParserEvent]) -> list[ParserEvent]:
    """Adjacent pieces of one kind (and call) joined: what two ways of feeding the same text must agree on."""
    merged: list[ParserEvent] = []
    parts: list[str] = []
    for event in events:
        last = merged[-1] if merged else None
        joins = event.kind in ("text", "reasoning", "tool_args")
        if joins and last and last.kind == event.kind and last.call_index == event.call_index:
            parts.append(event.text)
            continue
        _close(merged, parts)
        merged.append(event)
        parts = [event.text]
    _close(merged, parts)
    return merged


def _close(merged: list[ParserEvent], parts: list[str]) -> None:
    if len(parts) > 1:
        merged[-1] = dataclasses.replace(merged[-1], text="".join(parts))
