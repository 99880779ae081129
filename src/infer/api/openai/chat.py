"""`/v1/chat/completions`: chat messages in, an answer out, whole or as a stream of chunks.

Runs in request tasks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from infer.api import structured
from infer.api.artifacts import Wanted, all_vllm_routes, vllm_routes, wanted
from infer.api.context import ApiContext
from infer.api.openai import generation
from infer.api.openai.logprobs import chat_logprobs, prompt_logprobs, token_writer
from infer.api.openai.models import check_model
from infer.api.openai.progress import report_progress, silence
from infer.api.openai.schemas import CHAT, ChatBody
from infer.api.routing import ApiRoute, Call
from infer.api.sse import EventFrame
from infer.api.timings import timing_metrics
from infer.errors import InvalidRequestError
from infer.types import Completion, Delta, SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from infer.engine.stream import Stream


NO_ROUTES: Mapping[int, dict[str, Any]] = MappingProxyType({})


def routes(context: ApiContext) -> list[ApiRoute]:
    return [
        ApiRoute(
            method="POST",
            path="/v1/chat/completions",
            handler=structured.named(chat),
            summary="Answer a conversation",
            body=CHAT,
        )
    ]


async def chat(call: Call) -> Response | None:
    settings = call.context.settings
    body, values = CHAT.parse(call.data, unknown=settings.unknown_fields, notices=call.notices)
    model = check_model(call.context, body.model)
    wants_usage = generation.check_stream_options(body, call)
    params = chat_params(body, values, call)
    artifact = wanted(call.data)
    try:
        prompt_ids = await encode_chat(body, params, call)
        [ask] = generation.make_asks(call, "chatcmpl", [prompt_ids], params, body, artifact.request)
        writer = ChatWriter(call.context, body, model, ask.request_id, params.logprob_token_ids or ())
        if body.stream:
            async with generation.opened(call, [ask]) as [stream]:
                await _stream(call, body, writer, stream, artifact, wants_usage)
            return None
        [done] = await generation.generate_all(call, [ask])
    except InvalidRequestError as error:
        if error.parameter == "prompt":
            error.parameter = "messages"
        raise
    [routes] = await all_vllm_routes(call.context.engine, [done])
    return call.json(writer.reply(done, routes) | artifact.keys(done))


def chat_params(body: ChatBody, values: dict[str, Any], call: Call) -> SamplingParams:
    """Sampling as the body asks for it."""
    limit = body.max_completion_tokens
    if limit is not None and values.setdefault("max_tokens", limit) != limit:
        raise InvalidRequestError(
            f"max_tokens={values['max_tokens']} and max_completion_tokens={limit} differ; give one of them",
            parameter="max_completion_tokens",
            value=limit,
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs=true", parameter="top_logprobs", value=body.top_logprobs)
    if body.logprobs:
        values["logprobs"] = body.top_logprobs or 0
    generation.ask_for_beams(body, values)
    structured.ask(values, structured.asked(body.response_format, body.structured_outputs))
    try:
        return generation.sampling_params(values, call.context.settings)
    except InvalidRequestError as error:
        if error.parameter == "logprobs":
            raise InvalidRequestError(
                str(error).replace("logprobs", "top_logprobs", 1), parameter="top_logprobs", value=error.value
            ) from None
        raise


async def encode_chat(body: ChatBody, params: SamplingParams, call: Call) -> list[int]:
    """Token ids of the conversation, as its template writes them, cut to length if asked."""
    ids = await call.context.engine.prompts.encode(
        chat_messages(body, call),
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        variables=template_variables(body),
    )
    return generation.cut_prompt(ids, body, call, params.max_tokens)


def chat_messages(body: ChatBody, call: Call) -> list[dict[str, Any]]:
    """The messages; "developer" becomes "system" for templates that do not know it."""
    if not body.messages:
        raise InvalidRequestError("messages is empty: send at least one", parameter="messages", value=[])
    template = call.context.engine.config.model.chat_template or call.context.engine.tokenizer.chat_template
    if any(message.get("role") == "developer" for message in body.messages) and "developer" not in str(template):
        call.notices.append('messages: role "developer" is sent as "system"; the chat template knows no other')
        return [
            {**message, "role": "system"} if message.get("role") == "developer" else message
            for message in body.messages
        ]
    return body.messages


def template_variables(body: ChatBody) -> dict[str, Any]:
    variables = dict(body.chat_template_kwargs or {})
    for name in ("documents", "reasoning_effort"):
        value = getattr(body, name)
        if value is not None:
            variables[name] = value
    return variables


class ChatWriter:
    """Writes one call's reply, or its chunks."""

    def __init__(
        self, context: ApiContext, body: ChatBody, model: str, reply_id: str, candidate_ids: Sequence[int] = ()
    ) -> None:
        self._context = context
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
            reason, stop_reason = generation.finish(choice.finish_reason, choice.stop_reason)
            one: dict[str, Any] = {
                "index": choice.index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": chat_logprobs(choice.logprobs, self._write, self._text, self._candidate_ids),
                "finish_reason": reason,
                "stop_reason": stop_reason,
                "seed": choice.seed,
            }
            if self._body.return_token_ids:
                one["token_ids"] = choice.token_ids
            choices.append(one | routes.get(choice.index, {}))
        counts = done.usage
        reply = {
            **self._head,
            "object": "chat.completion",
            "choices": choices,
            "usage": generation.usage(counts.prompt_tokens, counts.output_tokens, counts.cached_tokens),
            "sampling_defaults": done.sampling_defaults,
        }
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

    def delta(self, delta: Delta) -> dict[str, Any] | None:
        """One delta as a choice; None when there is nothing to tell the client yet."""
        ids = self._body.return_token_ids and bool(delta.token_ids)
        if not (delta.text or delta.finish_reason or delta.logprobs or ids):
            return None
        choice: dict[str, Any] = {
            "index": delta.choice_index,
            "delta": {"content": delta.text} if delta.text else {},
            "logprobs": chat_logprobs(delta.logprobs or None, self._write, self._text, self._candidate_ids),
            "finish_reason": None,
        }
        if delta.finish_reason is not None:
            choice["finish_reason"], choice["stop_reason"] = generation.finish(delta.finish_reason, delta.stop_reason)
        if self._body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice


async def _stream(
    call: Call, body: ChatBody, writer: ChatWriter, stream: Stream, artifact: Wanted, wants_usage: tuple[bool, bool]
) -> None:
    """Role frames at once, then deltas, each choice's last with its finish reason, then usage."""
    last_usage, every_usage = wants_usage
    events = await call.open_events(comment=lambda: silence([stream]))
    blank: dict[str, Any] = {"usage": None} if last_usage else {}
    prompt_len = len(stream.prompt_token_ids)
    for index in range(len(stream.seeds)):
        counted = {"usage": generation.usage(prompt_len, 0)} if every_usage else blank
        await events.send({**writer.role(index, stream), **counted})
    if body.return_progress:
        call.tasks.start_soon(report_progress, events, [stream], writer.chunk)
    told_prompt = stream.prompt_logprobs is None
    count = 0
    async for delta in generation.Deltas(stream):
        count += len(delta.token_ids)
        choice = writer.delta(delta)
        if choice is None:
            continue
        extra: dict[str, Any] = dict(blank)
        if delta.finish_reason is not None:
            extra |= artifact.chunk_keys(stream, delta)
            ended = stream.choice(delta.choice_index)
            choice |= await vllm_routes(call.context.engine, stream.prompt_token_ids, ended)
        if every_usage:
            extra["usage"] = generation.usage(prompt_len, count)
        if not told_prompt:
            told_prompt = True
            extra["prompt_logprobs"] = writer.prompt_logprobs(stream.prompt_logprobs)
        await events.write(writer.frame.event(choice, extra))
    last: dict[str, Any] = {}
    if last_usage:
        counts = stream.result.usage
        last["usage"] = generation.usage(counts.prompt_tokens, counts.output_tokens, counts.cached_tokens)
    if body.return_metrics:
        last["metrics"] = timing_metrics(stream.result)
    if last:
        await events.send(writer.chunk([], **last))
    await events.finish()
