"""Output items of one response, and the events that tell of them: reasoning, messages and calls in the order of the model.

Runs in the request task; owns the items.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from infer.api.openai.responses.token_pieces import TokenPiece, TokenRun
from infer.plugins.parser import ParserEvent
from infer.types import TokenLogprob

Item = dict[str, Any]
Event = dict[str, Any]
Status = Literal["completed", "incomplete"]


class OutputItems:
    """`take` what was said, then `end`. Each returns the events that it makes, in OpenAI's order, without numbers."""

    def __init__(self, suffix: str, write_logprobs: Callable[[Sequence[TokenLogprob]], list[dict[str, Any]]]) -> None:
        """`suffix`: makes ids unique."""
        self.items: list[Item] = []
        self._suffix = suffix
        self._write_logprobs = write_logprobs
        self._open: Item | None = None
        self._blank = ""
        """White space that begins a text, until it is known whether more comes: around calls it makes no message."""
        self._tokens = TokenRun()
        self._events: list[Event] = []

    def take(self, said: Sequence[ParserEvent], token: TokenPiece | None = None) -> list[Event]:
        """`token`: the one that said it, where log-probabilities are told."""
        if token is not None:
            self._tokens.add(token)
        for event in said:
            if event.kind == "text":
                self._text(event.text)
                continue
            self._tokens.clear()
            self._blank = ""
            if event.kind == "reasoning":
                self._reason(event.text)
            elif event.kind == "tool_start":
                self._call(event)
            elif event.kind == "tool_args":
                self._argue(event.text)
            elif self._open is not None and self._open["type"] == "function_call":
                self._close("completed")
        return self._told()

    def end(self, status: Status) -> list[Event]:
        """A response that says nothing says it in an empty message."""
        if not self.items:
            self._begin({"id": self._id("msg"), "type": "message", "role": "assistant", "content": []})
            self._add_part({"type": "output_text", "text": "", "annotations": [], "logprobs": []})
            self._say(self._blank)
        if self._open is not None:
            broken = self._open["type"] == "function_call"  # a whole one is closed already
            self._close("incomplete" if broken else status)
        return self._told()

    def _told(self) -> list[Event]:
        told, self._events = self._events, []
        return told

    # -- what is said --------------------------------------------------------------------------------------------------

    def _text(self, text: str) -> None:
        if self._open is None or self._open["type"] != "message":
            text = self._blank + text
            if not text.strip():
                self._blank = text
                return
            self._blank = ""
            self._begin({"id": self._id("msg"), "type": "message", "role": "assistant", "content": []})
            self._add_part({"type": "output_text", "text": "", "annotations": [], "logprobs": []})
        self._say(text)

    def _say(self, text: str) -> None:
        if not text or self._open is None:
            return
        part = self._open["content"][0]
        logprobs = self._write_logprobs(self._tokens.take(len(text)))
        part["text"] += text
        part["logprobs"] += logprobs
        self._tell("output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def _reason(self, text: str) -> None:
        if self._open is None or self._open["type"] != "reasoning":
            self._begin({"id": self._id("rs"), "type": "reasoning", "summary": [], "content": []})
            self._add_part({"type": "reasoning_text", "text": ""})
        if self._open is not None:
            self._open["content"][0]["text"] += text
            self._tell("reasoning_text.delta", content_index=0, delta=text)

    def _call(self, event: ParserEvent) -> None:
        self._begin(
            {
                "id": self._id("fc"),
                "type": "function_call",
                "call_id": event.call_id,
                "name": event.text,
                "arguments": "",
            }
        )

    def _argue(self, text: str) -> None:
        if self._open is not None and self._open["type"] == "function_call":
            self._open["arguments"] += text
            self._tell("function_call_arguments.delta", delta=text)

    # -- items ---------------------------------------------------------------------------------------------------------

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._suffix}{len(self.items):02x}"

    def _begin(self, item: Item) -> None:
        if self._open is not None:
            self._close("incomplete" if self._open["type"] == "function_call" else "completed")
        self._open = {**item, "status": "in_progress"}
        self.items.append(self._open)
        self._tell("output_item.added", item=_copy(self._open))

    def _add_part(self, part: dict[str, Any]) -> None:
        if self._open is not None:
            self._open["content"].append(part)
            self._tell("content_part.added", content_index=0, part=_copy(part))

    def _close(self, status: Status) -> None:
        item = self._open
        if item is None:
            return
        if item["type"] == "function_call":
            self._tell("function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        else:
            part = item["content"][0]
            if item["type"] == "message":
                logprobs = list(part["logprobs"])
                self._tell("output_text.done", content_index=0, text=part["text"], logprobs=logprobs)
            else:
                self._tell("reasoning_text.done", content_index=0, text=part["text"])
            self._tell("content_part.done", content_index=0, part=_copy(part))
        item["status"] = status
        self._tell("output_item.done", item=_copy(item))
        self._open = None

    def _tell(self, kind: str, /, **fields: Any) -> None:
        head: Event = {"type": f"response.{kind}", "output_index": len(self.items) - 1}
        if "item" not in fields and self._open is not None:
            head["item_id"] = self._open["id"]
        self._events.append(head | fields)


def _copy(value: Any) -> Any:
    """Events are sent later than they are made: what they hold must not grow meanwhile."""
    if isinstance(value, dict):
        return {key: _copy(inner) for key, inner in value.items()}
    return [_copy(inner) for inner in value] if isinstance(value, list) else value
