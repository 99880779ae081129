"""The parts of an answer to a chat, as results carry them. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A function that the model asks to have called."""

    id: str
    """Unique among the calls of a request, for the message that brings the result (`tool_call_id`)."""
    name: str
    """As the model wrote it: check that there is such a tool."""
    arguments: str
    """JSON text; of an object when `complete`. Only a grammar makes sure that it fits the schema."""
    complete: bool = True
    """False for a call that was cut off or broke."""

    def as_message(self) -> dict[str, Any]:
        """The entry of `tool_calls` in the assistant's message, as chat templates read it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedAnswer:
    """The parts of an answer to a chat, special tokens left out."""

    content: str
    """What is said to the reader: neither reasoning nor calls."""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
