"""`/v1/chat/completions`: chat messages in, an answer out, whole or as a stream of chunks.

Runs in request tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from infer.api import structured
from infer.api.artifacts import Wanted, all_vllm_routes, vllm_routes, wanted
from infer.api.context import ApiContext
from infer.api.openai import generation
from infer.api.openai.chat_writer import ChatWriter
from infer.api.openai.models import check_model
from infer.api.openai.progress import report_progress, silence
from infer.api.openai.schemas import CHAT, ChatBody
from infer.api.routing import ApiRoute, Call
from infer.api.timings import timing_metrics
from infer.api.tool_requests import read_tools
from infer.errors import InvalidRequestError
from infer.types import SamplingParams

if TYPE_CHECKING:
    from infer.api.answers import AnswerPlan
    from infer.engine.stream import Stream


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
    plan = answer_plan(body, values, call)
    params = chat_params(body, values, call, plan)
    artifact = wanted(call.data)
    try:
        prompt_ids = await encode_chat(body, params, call, plan)
        [ask] = generation.make_asks(call, "chatcmpl", [prompt_ids], params, body, artifact.request)
        writer = ChatWriter(call.context, body, model, ask.request_id, plan, params.logprob_token_ids or ())
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


def answer_plan(body: ChatBody, values: dict[str, Any], call: Call) -> AnswerPlan:
    """How the answers are made and read. Raises `InvalidRequestError`."""
    asked = read_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
    form = structured.asked(body.response_format, body.structured_outputs)
    plan = call.context.answers.plan(asked, form)
    return replace(plan, hides_special=values.get("skip_special_tokens") is not False)


def chat_params(body: ChatBody, values: dict[str, Any], call: Call, plan: AnswerPlan) -> SamplingParams:
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
    structured.ask(values, plan.form)
    if plan.reads:
        values["skip_special_tokens"] = False  # parsers need them; the reader is not shown them
    try:
        return generation.sampling_params(values, call.context.settings)
    except InvalidRequestError as error:
        if error.parameter == "logprobs":
            raise InvalidRequestError(
                str(error).replace("logprobs", "top_logprobs", 1), parameter="top_logprobs", value=error.value
            ) from None
        raise


async def encode_chat(body: ChatBody, params: SamplingParams, call: Call, plan: AnswerPlan) -> list[int]:
    """Token ids of the conversation, as its template writes them, cut to length if asked."""
    ids = await call.context.engine.prompts.encode(
        chat_messages(body, call, plan),
        tools=template_tools(plan),
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        variables=template_variables(body),
    )
    return generation.cut_prompt(ids, body, call, params.max_tokens)


def template_tools(plan: AnswerPlan) -> list[dict[str, Any]] | None:
    """For a template that knows tools; None: there are none to show."""
    return list(plan.asked.tools) if plan.asked.tools and plan.formats.shows_tools else None


def chat_messages(body: ChatBody, call: Call, plan: AnswerPlan) -> list[dict[str, Any]]:
    """The messages; "developer" becomes "system" for templates that do not know it, and tools words."""
    if not body.messages:
        raise InvalidRequestError("messages is empty: send at least one", parameter="messages", value=[])
    messages = body.messages
    if any(message.get("role") == "developer" for message in messages) and "developer" not in plan.formats.template:
        call.notices.append('messages: role "developer" is sent as "system"; the chat template knows no other')
        messages = [
            {**message, "role": "system"} if message.get("role") == "developer" else message for message in messages
        ]
    return shown_messages(messages, call, plan)


def shown_messages(messages: Sequence[dict[str, Any]], call: Call, plan: AnswerPlan) -> list[dict[str, Any]]:
    """As the template gets them: one that knows no tools is told of them in words."""
    if plan.asked.tools and not plan.formats.shows_tools:
        call.notices.append("tools: the chat template knows none; the system message lists them")
    return plan.formats.messages(messages, plan.asked)


def template_variables(body: ChatBody) -> dict[str, Any]:
    variables = dict(body.chat_template_kwargs or {})
    for name in ("documents", "reasoning_effort"):
        value = getattr(body, name)
        if value is not None:
            variables[name] = value
    return variables


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
        choice = writer.delta(delta, stream.prompt_token_ids)
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
        writer.add_reasoning(last["usage"], stream.result)
    if body.return_metrics:
        last["metrics"] = timing_metrics(stream.result)
    if last:
        await events.send(writer.chunk([], **last))
    await events.finish()
