"""Writes what the model says as Anthropic's content blocks: one event after the other, or whole.

One per call; runs in request tasks. Owns the reader of the answer and the open block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json

from infer.errors import StepError

if TYPE_CHECKING:
    from infer.api.answers import AnswerReader
    from infer.plugins.parser import ParserEvent
    from infer.types import Completion

Event = dict[str, Any]


class MessageWriter:
    """`shows_thinking`: whether reasoning has blocks, and whether they hold it ("omitted": a signature alone)."""

    def __init__(
        self, reader: AnswerReader, head: dict[str, Any], *, shows_thinking: bool, omits_thinking: bool
    ) -> None:
        self._reader = reader
        self._head = {**head, "type": "message", "role": "assistant"}
        self._shows_thinking = shows_thinking
        self._omits_thinking = omits_thinking
        self._index = -1
        self._kind = ""
        """Of the open block; "" when there is none."""
        self._held = ""
        """White space that is nothing but white space so far: a block of it alone would be refused when it is sent back."""
        self._signature = hashlib.sha256()

    # -- the message ---------------------------------------------------------------------------------------------------

    def start(self, prompt_tokens: int) -> Event:
        """The first event. What came from the prefix cache is known at the end."""
        usage = _usage(prompt_tokens, 0, 0)
        blank: Event = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return {"type": "message_start", "message": {**self._head, **blank}}

    def end(self, done: Completion, max_tokens: int) -> list[Event]:
        """The last two events."""
        ended = {"type": "message_delta", "delta": self._ending(done, max_tokens), "usage": self._counts(done)}
        return [ended, {"type": "message_stop"}]

    def whole(self, done: Completion, max_tokens: int) -> dict[str, Any]:
        """The message, made of the events that a stream would have had."""
        events = [event for choice in done.choices for event in self.feed(choice.text, choice.token_ids, last=True)]
        return {
            **self._head,
            "content": assembled(events),
            **self._ending(done, max_tokens),
            "usage": self._counts(done),
        }

    def _ending(self, done: Completion, max_tokens: int) -> dict[str, Any]:
        reason, matched = done.finish_reason, done.stop_reason
        told, sequence = "end_turn", None
        if reason in ("deadline", "abort"):
            told = "pause_turn"  # the turn was not over; sent back, it is continued
        elif reason == "length":
            told = "max_tokens" if done.usage.output_tokens >= max_tokens else "model_context_window_exceeded"
        elif self._reader.complete_calls:
            told = "tool_use"
        elif isinstance(matched, str):
            told, sequence = "stop_sequence", matched
        return {"stop_reason": told, "stop_sequence": sequence}

    def _counts(self, done: Completion) -> dict[str, Any]:
        usage = done.usage
        counts = _usage(usage.prompt_tokens, usage.cached_tokens, usage.output_tokens)
        thought = sum(self._reader.count_reasoning(choice.token_ids) for choice in done.choices)
        return {**counts, "output_tokens_details": {"thinking_tokens": thought}}

    # -- its blocks ----------------------------------------------------------------------------------------------------

    def feed(self, text: str, token_ids: Sequence[int], *, last: bool) -> list[Event]:
        """The events of a piece of the answer; `last`: nothing follows."""
        events: list[Event] = []
        for said in self._reader.read(text, token_ids, last=last):
            events += self._events(said)
        if last:
            if self._held and self._index < 0:  # white space is all there is
                held = self._held
                events += [*self._opened("text", text=""), self._delta("text_delta", text=held)]
            events += self._closed()
        return events

    def _events(self, said: ParserEvent) -> Iterator[Event]:
        if said.kind == "text":
            yield from self._say(said.text)
        elif said.kind == "reasoning":
            if self._shows_thinking:
                yield from self._think(said.text)
        elif said.kind == "tool_start":
            yield from self._closed()
            yield from self._opened("tool_use", id=said.call_id, name=said.text, input={})
        elif said.kind == "tool_args" and said.text:
            yield self._delta("input_json_delta", partial_json=said.text)

    def _think(self, text: str) -> Iterator[Event]:
        yield from self._opened("thinking", thinking="", signature="")
        self._signature.update(text.encode("utf-8", "surrogatepass"))
        if not self._omits_thinking:
            yield self._delta("thinking_delta", thinking=text)

    def _say(self, text: str) -> Iterator[Event]:
        if self._kind != "text":
            text = self._held + text
            if not text.strip():
                self._held = text
                return
            yield from self._opened("text", text="")
        yield self._delta("text_delta", text=text)

    def _opened(self, kind: str, **block: Any) -> Iterator[Event]:
        """A block of that kind, unless one is open."""
        if self._kind == kind:
            return
        yield from self._closed()
        self._index, self._kind, self._held = self._index + 1, kind, ""
        self._signature = hashlib.sha256()
        yield {"type": "content_block_start", "index": self._index, "content_block": {"type": kind, **block}}

    def _closed(self) -> Iterator[Event]:
        if self._kind == "thinking":  # clients send blocks back only with one; nobody checks it
            yield self._delta("signature_delta", signature=self._signature.hexdigest())
        if self._kind:
            self._kind = ""
            yield {"type": "content_block_stop", "index": self._index}

    def _delta(self, kind: str, **values: str) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": {"type": kind, **values}}


def assembled(events: Iterable[Event]) -> list[dict[str, Any]]:
    """The content that a client makes of the events."""
    blocks: list[dict[str, Any]] = []
    written: dict[int, str] = {}
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            for name, piece in event["delta"].items():
                if name == "partial_json":
                    written[event["index"]] = written.get(event["index"], "") + piece
                elif name != "type":
                    blocks[event["index"]][name] += piece
    for index, text in written.items():
        blocks[index] |= {"input": _input(text)}
    return blocks


def _input(text: str) -> dict[str, Any]:
    """Of a call that was cut off: the members that were complete. Parsers let only JSON of objects through."""
    try:
        value = from_json(text, allow_partial=True)
    except ValueError:  # nested more deeply than it reads
        raise StepError("the model called a tool with arguments that are nested too deeply; ask again") from None
    return value if isinstance(value, dict) else {}


def _usage(prompt_tokens: int, cached_tokens: int, output_tokens: int) -> dict[str, Any]:
    """The prompt's tokens are those of three fields together."""
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": output_tokens,
    }
