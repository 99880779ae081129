"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's way to ask for an answer.

Runs in request tasks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from infer.api import structured
from infer.api.answers import AnswerPlan, AnswerReader
from infer.api.anthropic.conversation import ConversationReader, at
from infer.api.anthropic.errors import PING, MessageEvents, refusal
from infer.api.anthropic.schemas import (
    COUNT_TOKENS,
    MESSAGES,
    OUTPUT_CONFIG,
    THINKING,
    ConversationBody,
    MessagesBody,
    OutputConfig,
    Thinking,
)
from infer.api.anthropic.writer import MessageWriter
from infer.api.context import ApiContext
from infer.api.errors import ApiError
from infer.api.openai import chat, generation
from infer.api.openai.models import check_model
from infer.api.routing import ApiRoute, Call
from infer.errors import InvalidRequestError
from infer.types import SamplingParams

if TYPE_CHECKING:
    from infer.engine.stream import Stream

VERSIONS = ("2026-10-21", "2023-06-01")
"""What `anthropic-version` may state. The sampling that the newer one took away is honoured in both."""
_FIELDS = {
    "stop": "stop_sequences",
    "thinking_budget": "thinking.budget_tokens",
    "prompt": "messages",
    "continue_final_message": "messages",
    "response_format": "output_config.format",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}
"""Name that a refusal may have for it -> the client's."""


def routes(context: ApiContext) -> list[ApiRoute]:
    return [
        ApiRoute(
            method="POST",
            path="/v1/messages",
            handler=messages,
            summary="Anthropic: answer a conversation",
            body=MESSAGES,
            refusal=refusal,
        ),
        ApiRoute(
            method="POST",
            path="/v1/messages/count_tokens",
            handler=count_tokens,
            summary="Anthropic: tokens of a conversation",
            body=COUNT_TOKENS,
            refusal=refusal,
        ),
    ]


@dataclass(frozen=True, slots=True)
class _Asked:
    """What both routes read."""

    model: str
    plan: AnswerPlan
    thinking: Thinking | None
    prompt_ids: list[int]


async def messages(call: Call) -> Response | None:
    context = call.context
    if call.data.get("thread") is not None:  # the client's tool runner goes on without one when it is told so
        note = MESSAGES.unsupported["thread"].note
        raise ApiError(f"thread is not supported: {note}", code="thread_unsupported_request", parameter="thread")
    body, values = MESSAGES.parse(call.data, unknown=context.settings.unknown_fields, notices=call.notices)
    try:
        asked = await _read(call, body)
        params = _params(call, body, values, asked)
        ask = generation.Ask(
            prompt=asked.prompt_ids,
            params=params,
            request_id=f"msg_{call.unique_id}",
            priority=0,
            cache_salt=None,
            deadline=context.settings.request_deadline,
        )
        writer = _writer(call, asked, ask.request_id)
        if body.stream:
            async with generation.opened(call, [ask]) as [stream]:
                await _stream(call, writer, stream, body.max_tokens)
            return None
        [done] = await generation.generate_all(call, [ask])
    except InvalidRequestError as error:
        error.parameter = _client_name(error.parameter, body)
        raise
    return call.json(writer.whole(done, body.max_tokens))


async def count_tokens(call: Call) -> Response:
    body, _ = COUNT_TOKENS.parse(call.data, unknown=call.context.settings.unknown_fields, notices=call.notices)
    try:
        asked = await _read(call, body)
    except InvalidRequestError as error:
        error.parameter = _client_name(error.parameter, body)
        raise
    return call.json({"input_tokens": len(asked.prompt_ids)})


async def _read(call: Call, body: ConversationBody) -> _Asked:
    """Check what is asked, and write the prompt."""
    _check_headers(call)
    context = call.context
    reader = ConversationReader(context.settings.unknown_fields, call.notices)
    model = check_model(context, body.model)
    thinking: Thinking | None = None
    if body.thinking is not None:
        thinking = reader.parsed(THINKING, body.thinking, "thinking")
        _check_thinking(thinking, body, call)
    config: OutputConfig = reader.parsed(OUTPUT_CONFIG, body.output_config or {}, "output_config")
    plan = context.answers.plan(reader.tools(body), _form(config))
    variables: dict[str, Any] = {}
    if thinking is not None:
        variables["enable_thinking"] = thinking.type != "disabled"
    if config.effort is not None:
        variables["reasoning_effort"] = config.effort
    prompt_ids = await context.engine.prompts.encode(
        chat.shown_messages(reader.messages(body), call, plan), tools=chat.template_tools(plan), variables=variables
    )
    return _Asked(model, plan, thinking, prompt_ids)


def _check_headers(call: Call) -> None:
    version = call.headers.get("anthropic-version")
    if version is not None and version not in VERSIONS:
        raise ApiError(f"anthropic-version: {version[:100]!r} is not supported; send one of {', '.join(VERSIONS)}")
    if "anthropic-beta" in call.headers:
        call.notices.append("anthropic-beta: no beta changes what this server does")


def _check_thinking(thinking: Thinking, body: ConversationBody, call: Call) -> None:
    budget = thinking.budget_tokens
    if thinking.type == "enabled" and budget is None:
        raise InvalidRequestError(
            'thinking.budget_tokens is missing: type "enabled" needs it; "adaptive" leaves it to the model',
            parameter="thinking.budget_tokens",
        )
    if thinking.type != "enabled" and budget is not None:
        raise InvalidRequestError(
            f'thinking.budget_tokens={budget} belongs to type "enabled", not "{thinking.type}"',
            parameter="thinking.budget_tokens",
            value=budget,
        )
    if budget is not None and isinstance(body, MessagesBody) and budget >= body.max_tokens:
        raise InvalidRequestError(
            f"thinking.budget_tokens={budget} is not less than max_tokens={body.max_tokens}: none would be left for the answer",
            parameter="thinking.budget_tokens",
            value=budget,
        )
    if thinking.type == "adaptive" and call.context.answers.reasoning is None:
        call.notices.append("thinking: the model's chat template shows no reasoning that infer knows")


def _form(config: OutputConfig) -> dict[str, Any] | None:
    """`output_config.format` as `SamplingParams.structured_output`."""
    if config.format is None:
        return None
    if config.format.get("type") != "json_schema" or set(config.format) - {"type", "schema"}:
        raise InvalidRequestError(
            'output_config.format is not {"type": "json_schema", "schema": ...}', parameter="output_config.format"
        )
    with at("output_config.format"):
        return structured.of_response_format(
            {"type": "json_schema", "json_schema": {"schema": config.format.get("schema")}}
        )


def _params(call: Call, body: MessagesBody, values: dict[str, Any], asked: _Asked) -> SamplingParams:
    """A limit beyond the context is no error: clients state what their largest model can."""
    room = call.context.engine.max_model_len - len(asked.prompt_ids)
    if body.max_tokens <= max(room, 1):
        values["max_tokens"] = body.max_tokens
    if asked.thinking is not None and asked.thinking.budget_tokens is not None:
        values["thinking_budget"] = asked.thinking.budget_tokens
    structured.ask(values, asked.plan.form)
    if asked.plan.reads:
        values["skip_special_tokens"] = False  # parsers need them; the reader is not shown them
    return generation.sampling_params(values, call.context.settings)


def _writer(call: Call, asked: _Asked, message_id: str) -> MessageWriter:
    context, thinking = call.context, asked.thinking
    reader = AnswerReader(
        asked.plan, asked.prompt_ids, context.engine.tokenizer, f"toolu_{call.unique_id}", context.token_text
    )
    return MessageWriter(
        reader,
        {"id": message_id, "model": asked.model},
        shows_thinking=thinking is None or thinking.type != "disabled",
        omits_thinking=thinking is not None and thinking.display == "omitted",
    )


async def _stream(call: Call, writer: MessageWriter, stream: Stream, max_tokens: int) -> None:
    events = await call.open_events(kind=MessageEvents)
    await events.send([writer.start(len(stream.prompt_token_ids)), PING])
    async for delta in stream:
        await events.send(writer.feed(delta.text, delta.token_ids, last=delta.finish_reason is not None))
    await events.send(writer.end(stream.result, max_tokens))
    await events.finish(b"")


def _client_name(parameter: str, body: ConversationBody) -> str:
    if parameter == "structured_output":
        return "tools" if body.tools and body.output_config is None else "output_config.format"
    return _FIELDS.get(parameter, parameter)
