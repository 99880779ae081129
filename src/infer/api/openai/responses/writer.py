"""Writes one response: the object whole, or the events of a stream, from the same items.

One per call; runs in its request task. Owns the reader of the answer and the numbers of events.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from infer.api.answers import AnswerReader
from infer.api.errors import describe
from infer.api.openai import generation
from infer.api.openai.logprobs import chat_logprobs
from infer.api.openai.responses.output import Event, OutputItems
from infer.api.openai.responses.token_pieces import TokenPieces
from infer.api.sse import EventStream

if TYPE_CHECKING:
    from infer.api.answers import AnswerPlan
    from infer.api.context import ApiContext
    from infer.types import Completion, SamplingParams, TokenLogprob

_INCOMPLETE = {"length": "max_output_tokens"}
"""Finish reason as chat has it -> OpenAI's word here; others are sent as they are."""


class ResponseWriter:
    def __init__(
        self,
        context: ApiContext,
        response_id: str,
        model: str,
        echo: Mapping[str, Any],
        plan: AnswerPlan,
        params: SamplingParams,
        prompt_ids: Sequence[int],
    ) -> None:
        suffix = response_id.removeprefix("resp_")
        tokenizer = context.engine.tokenizer
        self.response: dict[str, Any] = {
            "id": response_id,
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "model": model,
            "output": [],
            "temperature": params.temperature,
            "top_p": params.top_p,
            "usage": None,
            "stop_reason": None,
            **echo,
        }
        self._plan = plan
        self._text = context.token_text
        self._reader = AnswerReader(plan, prompt_ids, tokenizer, f"call_{suffix}", context.token_text)
        self._output = OutputItems(suffix, self._logprobs)
        self.response["output"] = self._output.items
        self._pieces: TokenPieces | None = None
        if params.logprobs is not None:
            self._pieces = TokenPieces(tokenizer, prompt_ids, skip_special_tokens=params.skip_special_tokens)
        self._number = 0

    def begin(self, seed: int, defaults: Mapping[str, Any]) -> None:
        """The request is admitted: what is in force is known."""
        in_force = {name: defaults[name] for name in ("temperature", "top_p") if name in defaults}
        self.response |= {**in_force, "seed": seed, "sampling_defaults": dict(defaults)}

    def opening(self) -> list[Event]:
        return [self._whole("response.created"), self._whole("response.in_progress")]

    def feed(
        self, text: str, token_ids: Sequence[int], entries: Sequence[TokenLogprob] | None, *, last: bool = False
    ) -> list[Event]:
        """A piece of the model's text; the events that it makes."""
        if self._pieces is None:
            return self._numbered(self._output.take(self._reader.read(text, token_ids, last=last)))
        events: list[Event] = []
        for piece, token in self._pieces.cut(text, entries or (), last=last):
            ids = () if token is None else (token.token_id,)
            events += self._output.take(self._reader.read(piece, ids), token)
        if last:
            events += self._output.take(self._reader.read("", (), last=True))
        return self._numbered(events)

    def end(self, done: Completion) -> list[Event]:
        """Everything was fed: the response is final, but for the event that says so."""
        reason, stop_reason = generation.finish(done.finish_reason, done.stop_reason)
        whole = reason == "stop"
        events = self._numbered(self._output.end("completed" if whole else "incomplete"))
        status = "completed" if whole else "cancelled" if reason == "abort" else "incomplete"
        if status == "incomplete":
            self.response["incomplete_details"] = {"reason": _INCOMPLETE.get(reason or "", reason)}
        self.response |= {
            "status": status,
            "completed_at": int(time.time()) if whole else None,
            "stop_reason": stop_reason,
            "usage": self._usage(done),
        }
        return events

    def closing(self) -> Event:
        """The last event. OpenAI has none of its own for a cancelled response."""
        return self._whole("response.completed" if self.response["status"] == "completed" else "response.incomplete")

    def failed(self, error: BaseException) -> Event:
        """The last event of a stream that cannot go on."""
        said = describe(error)[1]["error"]
        told = {"code": "server_error", "message": said["message"], "param": said["param"], "type": said["type"]}
        self.response |= {"status": "failed", "error": told}
        return self._whole("response.failed")

    def _usage(self, done: Completion) -> dict[str, Any]:
        """Chat's counts in this route's words."""
        counts, reasoned = done.usage, 0
        if self._plan.formats.reasoning is not None:
            reasoned = self._reader.count_reasoning(done.token_ids)
        return {
            "input_tokens": counts.prompt_tokens,
            "input_tokens_details": {"cached_tokens": counts.cached_tokens},
            "output_tokens": counts.output_tokens,
            "output_tokens_details": {"reasoning_tokens": reasoned},
            "total_tokens": counts.prompt_tokens + counts.output_tokens,
        }

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        written = chat_logprobs(entries or None, self._text, self._text)
        return [] if written is None else list(written["content"])

    def _whole(self, kind: str) -> Event:
        """Send it before anything else is fed: it holds the response itself."""
        [event] = self._numbered([{"type": kind, "response": self.response}])
        return event

    def _numbered(self, events: Sequence[Event]) -> list[Event]:
        first = self._number
        self._number += len(events)
        return [{"sequence_number": number, **event} for number, event in enumerate(events, start=first)]


class ResponseEvents(EventStream):
    """Named events; there is no end marker behind the last one."""

    writer: ResponseWriter | None = None

    async def send(self, event: Any) -> None:
        await self.write(b"event: " + event["type"].encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n")

    async def fail(self, error: BaseException) -> None:
        if self.ended:
            return
        if self.writer is None:
            await super().fail(error)
            return
        await self.send(self.writer.failed(error))
        await self.finish(b"")
