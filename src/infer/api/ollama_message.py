"""The assistant's message as Ollama writes it: content, thinking, and calls with their arguments as objects.

One per call; runs in request tasks. Owns the reader of the answer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infer.api.answers import AnswerReader, CallPiece


class OllamaMessage:
    """Calls come with the last piece, whole: Ollama's clients assemble no arguments."""

    def __init__(self, reader: AnswerReader, *, shows_thinking: bool) -> None:
        self._reader = reader
        self._shows_thinking = shows_thinking
        self._calls: list[CallPiece] = []

    def __call__(self, text: str, token_ids: Sequence[int], last: bool) -> dict[str, Any]:
        """What the text adds, as fields of a line."""
        piece = self._reader.feed(text, token_ids, last=last)
        for call in piece.calls:
            if call.name:
                self._calls.append(call)
            else:
                self._calls[-1].arguments += call.arguments
        message: dict[str, Any] = {"role": "assistant", "content": piece.text}
        if piece.reasoning and self._shows_thinking:
            message["thinking"] = piece.reasoning
        if last and self._calls:
            told = [(call, _object(call.arguments)) for call in self._calls]
            message["tool_calls"] = [
                {"function": {"name": call.name, "arguments": arguments}}
                for call, arguments in told
                if arguments is not None
            ]
            # A call that was cut off or broke is what was written of it.
            message["content"] += "".join(call.name + call.arguments for call, arguments in told if arguments is None)
        return {"message": message}


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
