"""Writes the replies of `/v1/chat/completions`: whole, or chunk by chunk.

One per call; runs in request tasks. Owns the reader of each choice.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from infer.api.answers import AnswerReader, CallPiece, Piece
from infer.api.openai import generation
from infer.api.openai.logprobs import chat_logprobs, prompt_logprobs, token_writer
from infer.api.sse import EventFrame
from infer.api.timings import timing_metrics
from infer.types import Completion, Delta, TokenLogprob

if TYPE_CHECKING:
    from infer.api.answers import AnswerPlan
    from infer.api.context import ApiContext
    from infer.api.openai.schemas import ChatBody
    from infer.engine.stream import Stream

NO_ROUTES: Mapping[int, dict[str, Any]] = MappingProxyType({})


class ChatWriter:
    """Writes one call's reply, or its chunks."""

    def __init__(
        self,
        context: ApiContext,
        body: ChatBody,
        model: str,
        reply_id: str,
        plan: AnswerPlan,
        candidate_ids: Sequence[int] = (),
    ) -> None:
        self._context = context
        self._plan = plan
        self._readers: dict[int, AnswerReader] = {}
        self._candidate_ids = candidate_ids
        self._body = body
        self._text = context.token_text
        self._write = token_writer(context.token_text, body.return_tokens_as_token_ids)
        self._head = {"id": reply_id, "created": int(time.time()), "model": model}
        self.frame = EventFrame({**self._head, "object": "chat.completion.chunk"})

    def reply(self, done: Completion, routes: Mapping[int, dict[str, Any]] = NO_ROUTES) -> dict[str, Any]:
        """`routes`: choice index -> what it says of its routed experts."""
        choices = []
        for choice in done.choices:
            reader = self._reader(choice.index, done.prompt_token_ids)
            message = self._message(reader.feed(choice.text, choice.token_ids, last=True))
            reason, stop_reason = self._finish(reader, choice.finish_reason, choice.stop_reason)
            one: dict[str, Any] = {
                "index": choice.index,
                "message": message,
                "logprobs": chat_logprobs(choice.logprobs, self._write, self._text, self._candidate_ids),
                "finish_reason": reason,
                "stop_reason": stop_reason,
                "seed": choice.seed,
            }
            if self._body.return_token_ids:
                one["token_ids"] = choice.token_ids
            choices.append(one | routes.get(choice.index, {}))
        counts = done.usage
        reply: dict[str, Any] = {
            **self._head,
            "object": "chat.completion",
            "choices": choices,
            "usage": generation.usage(counts.prompt_tokens, counts.output_tokens, counts.cached_tokens),
            "sampling_defaults": done.sampling_defaults,
        }
        self.add_reasoning(reply["usage"], done)
        if self._body.return_token_ids:
            reply["prompt_token_ids"] = done.prompt_token_ids
        if done.prompt_logprobs is not None:
            reply["prompt_logprobs"] = self.prompt_logprobs(done.prompt_logprobs)
        if self._body.return_metrics:
            reply["metrics"] = timing_metrics(done)
        return reply

    def prompt_logprobs(self, entries: Sequence[TokenLogprob | None] | None) -> list[Any] | None:
        return prompt_logprobs(entries, self._text, self._candidate_ids)

    def chunk(self, choices: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk", "choices": choices, **extra}

    def role(self, index: int, stream: Stream) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
            "seed": stream.seeds[index],
        }
        if index:
            return self.chunk([choice])
        extra = {"prompt_token_ids": stream.prompt_token_ids} if self._body.return_token_ids else {}
        return self.chunk([choice], sampling_defaults=stream.sampling_defaults, **extra)

    def delta(self, delta: Delta, prompt_ids: Sequence[int]) -> dict[str, Any] | None:
        """One delta as a choice; None when there is nothing to tell the client yet."""
        ids = self._body.return_token_ids and bool(delta.token_ids)
        reader = self._reader(delta.choice_index, prompt_ids)
        said = self._fields(reader.feed(delta.text, delta.token_ids, last=delta.finish_reason is not None))
        if not (said or delta.finish_reason or delta.logprobs or ids):
            return None
        choice: dict[str, Any] = {
            "index": delta.choice_index,
            "delta": said,
            "logprobs": chat_logprobs(delta.logprobs or None, self._write, self._text, self._candidate_ids),
            "finish_reason": None,
        }
        if delta.finish_reason is not None:
            reason, stop_reason = self._finish(reader, delta.finish_reason, delta.stop_reason)
            choice["finish_reason"], choice["stop_reason"] = reason, stop_reason
        if self._body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    # -- the message ---------------------------------------------------------------------------------------------------

    def add_reasoning(self, usage: dict[str, Any], done: Completion) -> None:
        """How many of the output tokens were reasoning, where the model reasons."""
        if self._plan.formats.reasoning is not None:
            counts = [self._readers[choice.index].count_reasoning(choice.token_ids) for choice in done.choices]
            usage["completion_tokens_details"] = {"reasoning_tokens": sum(counts)}

    def _reader(self, index: int, prompt_ids: Sequence[int]) -> AnswerReader:
        reader = self._readers.get(index)
        if reader is None:
            tokenizer, prefix = self._context.engine.tokenizer, f"{self._head['id']}-{index}"
            reader = AnswerReader(self._plan, prompt_ids, tokenizer, prefix, self._text)
            self._readers[index] = reader
        return reader

    def _finish(
        self, reader: AnswerReader, reason: str | None, stop_reason: int | str | None
    ) -> tuple[str | None, int | str | None]:
        reason, stop_reason = generation.finish(reason, stop_reason)
        return ("tool_calls" if reason == "stop" and reader.complete_calls else reason), stop_reason

    def _message(self, piece: Piece) -> dict[str, Any]:
        """A whole one. Without an answer its content is null, as OpenAI has it."""
        silent = not piece.text and bool(piece.calls or piece.reasoning)
        message: dict[str, Any] = {"role": "assistant", "content": None if silent else piece.text, "refusal": None}
        message |= self._reasoning(piece)
        if piece.calls:
            message["tool_calls"] = [
                {
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in piece.calls
            ]
        return message

    def _fields(self, piece: Piece) -> dict[str, Any]:
        """What a delta says; a call's id, type and name are in its first."""
        said = self._reasoning(piece)
        if piece.text:
            said["content"] = piece.text
        if piece.calls:
            said["tool_calls"] = [_call_delta(call) for call in piece.calls]
        return said

    def _reasoning(self, piece: Piece) -> dict[str, Any]:
        """Under both names that clients read."""
        if not piece.reasoning or not self._body.include_reasoning:
            return {}
        return {"reasoning": piece.reasoning, "reasoning_content": piece.reasoning}


def _call_delta(call: CallPiece) -> dict[str, Any]:
    if not call.name:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {
        "index": call.index,
        "id": call.call_id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
