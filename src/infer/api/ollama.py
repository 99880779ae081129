"""Ollama's routes over the one served model: list, show, ps, chat and generate; embedding is refused by name.

Runs in request tasks. Replies and errors have Ollama's shape, streams are lines of JSON.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response

from infer.api import structured
from infer.api.answers import AnswerPlan, AnswerReader
from infer.api.context import ApiContext
from infer.api.errors import ApiError, describe
from infer.api.fields import Body
from infer.api.ollama_message import OllamaMessage
from infer.api.ollama_schemas import CHAT, GENERATE, OPTIONS, SHOW, OllamaBody
from infer.api.openai import generation
from infer.api.openai.logprobs import chat_logprobs
from infer.api.routing import ApiRoute, Call, Handler
from infer.api.sse import EventStream
from infer.api.tool_requests import read_tools
from infer.api.utility import version
from infer.errors import InvalidRequestError
from infer.types import Completion, Delta, Prompt, RequestTimings, SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Callable

    from infer.engine.stream import Stream

_FOREVER = "9999-12-31T23:59:59Z"


def routes(context: ApiContext) -> list[ApiRoute]:
    ends: list[tuple[str, str, Handler, str, Body | None]] = [
        ("GET", "/api/version", version, "Version of the server", None),
        ("GET", "/api/tags", tags, "Ollama: models", None),
        ("GET", "/api/ps", running, "Ollama: loaded models", None),
        ("POST", "/api/show", show, "Ollama: facts of a model", SHOW),
        ("POST", "/api/chat", chat, "Ollama: answer a conversation", CHAT),
        ("POST", "/api/generate", generate, "Ollama: answer a prompt", GENERATE),
        ("POST", "/api/embed", no_embedding, "Refused: no embedding yet", None),
        ("POST", "/api/embeddings", no_embedding, "Refused: no embedding yet", None),
        *(("POST", f"/api/{act}", no_change, "Refused: one model", None) for act in ("pull", "push", "create", "copy")),
        ("DELETE", "/api/delete", no_change, "Refused: one model", None),
    ]
    return [
        ApiRoute(method=method, path=path, handler=handler, summary=summary, body=body, refusal=refusal)
        for method, path, handler, summary, body in ends
    ]


class JsonLines(EventStream):
    """One JSON object a line. There is no comment in it, so nothing is sent in silence."""

    def __init__(self, send: Any, headers: Mapping[str, str], **settings: Any) -> None:
        super().__init__(send, headers, **{**settings, "keep_alive": math.inf, "media_type": "application/x-ndjson"})

    async def send(self, event: Any) -> None:
        await self.write(msgspec.json.encode(event) + b"\n")

    async def fail(self, error: BaseException) -> None:
        if not self.ended:
            await self.send({"error": describe(error)[1]["error"]["message"]})
            await self.finish(b"")


def refusal(error: BaseException) -> Response:
    """Ollama's error body."""
    status, body, headers = describe(error)
    told = {"error": body["error"]["message"]}
    return Response(msgspec.json.encode(told), status, headers, media_type="application/json")


# -- models ------------------------------------------------------------------------------------------------------------


async def tags(call: Call) -> Response:
    return call.json({"models": [_model(call.context, name) for name in call.context.model_names]})


async def running(call: Call) -> Response:
    context = call.context
    more = {"expires_at": _FOREVER, "size_vram": 0, "context_length": context.engine.max_model_len}
    return call.json({"models": [_model(context, name) | more for name in context.model_names]})


async def show(call: Call) -> Response:
    context = call.context
    body, _ = SHOW.parse(call.data, unknown=context.settings.unknown_fields, notices=call.notices)
    name = body.model or body.name
    if name is None:
        raise InvalidRequestError("model is missing", parameter="model")
    check_name(context, name)
    model = context.engine.model_config
    template = context.engine.config.model.chat_template or context.engine.tokenizer.chat_template
    return call.json(
        {
            "modelfile": f"FROM {context.engine.config.model.ref}\n",
            "parameters": "".join(f"{key} {value}\n" for key, value in model.generation.values.items()),
            "template": template if isinstance(template, str) else (template or {}).get("default", ""),
            "details": _details(context),
            "model_info": {
                "general.architecture": model.architecture,
                "general.context_length": context.engine.max_model_len,
                "tokenizer.vocab_size": model.vocab_size,
            },
            "capabilities": _capabilities(context),
            "modified_at": _time(context.created),
        }
    )


def _capabilities(context: ApiContext) -> list[str]:
    """Clients send tools, or ask for thinking, only where these are named."""
    answers = context.answers
    found = ["completion"]
    if answers.calls_auto:
        found.append("tools")
    if answers.reasoning is not None:
        found.append("thinking")
    return found


async def no_embedding(call: Call) -> Response:
    raise ApiError("embed is not supported: the served model generates text, pooling is not there yet", code="no_embed")


async def no_change(call: Call) -> Response:
    raise ApiError(
        f"{call.route.path} is not supported: this server has one model, chosen when it starts", code="one_model"
    )


def check_name(context: ApiContext, name: str) -> str:
    """Raises `ApiError` 404 for a model nobody serves. A name without a tag means ":latest"."""
    if name in context.model_names or name.removesuffix(":latest") in context.model_names:
        return name
    raise ApiError(f"model {name[:200]!r} not found; served: {', '.join(context.model_names)}", status=404)


def _model(context: ApiContext, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "model": name,
        "modified_at": _time(context.created),
        "size": context.engine.resolved.memory.weights,
        "digest": hashlib.sha256(context.engine.model_config.identity.encode()).hexdigest(),
        "details": _details(context),
    }


def _details(context: ApiContext) -> dict[str, Any]:
    model = context.engine.model_config
    family = model.architecture.removesuffix("ForCausalLM").lower()
    resolved = context.engine.resolved
    stored = (model.quantization or {}).get("quant_method", resolved.dtype)
    return {
        "parent_model": "",
        "format": model.format,
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": str(resolved.quantization or stored),
    }


def _time(seconds: float | None = None) -> str:
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat().replace("+00:00", "Z")


# -- answers -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes one call's lines. `piece` puts text, of these tokens and perhaps the last, where the route has it."""

    context: ApiContext
    model: str
    piece: Callable[[str, Sequence[int], bool], dict[str, Any]]

    def line(self, delta: Delta) -> dict[str, Any]:
        return {**self._head(delta.text, delta.token_ids), "done": False, **self._logprobs(delta.logprobs)}

    def last(self, done: Completion, *, text: str = "", whole: bool = False) -> dict[str, Any]:
        """The end, with counts and times; `whole`: with everything."""
        timings = done.timings or RequestTimings(0.0, None, 0.0)
        reason, _ = generation.finish(done.finish_reason, done.stop_reason)
        return {
            **self._head(text, done.token_ids, last=True),
            "done": True,
            "done_reason": reason,
            "total_duration": _nanoseconds(timings.total),
            "load_duration": 0,
            "prompt_eval_count": done.usage.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(timings.prefill),
            "eval_count": done.usage.output_tokens,
            "eval_duration": _nanoseconds(timings.decode),
            **(self._logprobs(done.logprobs) if whole else {}),
        }

    def loaded(self) -> dict[str, Any]:
        return {**self._head(""), "done": True, "done_reason": "load"}

    def _head(self, text: str, token_ids: Sequence[int] = (), *, last: bool = False) -> dict[str, Any]:
        return {"model": self.model, "created_at": _time(), **self.piece(text, token_ids, last)}

    def _logprobs(self, entries: Sequence[TokenLogprob] | None) -> dict[str, Any]:
        written = chat_logprobs(entries, self.context.token_text, self.context.token_text)
        return {} if written is None else {"logprobs": written["content"]}


async def chat(call: Call) -> Response | None:
    body, _ = CHAT.parse(call.data, unknown=call.context.settings.unknown_fields, notices=call.notices)
    name = check_name(call.context, body.model)
    if not body.messages:
        empty = {"message": {"role": "assistant", "content": ""}}
        return call.json(Writer(call.context, name, lambda text, token_ids, last: empty).loaded())
    for index, message in enumerate(body.messages):
        if message.get("images"):
            raise InvalidRequestError(
                f"messages[{index}].images is not supported: infer takes text only", parameter="messages"
            )
    plan = call.context.answers.plan(read_tools(body.tools, None, None), structured.of_ollama(body.format))
    shown = list(plan.asked.tools) if plan.formats.shows_tools else []
    prompt_ids = await call.context.engine.prompts.encode(
        plan.formats.messages(body.messages, plan.asked),
        tools=shown or None,
        variables={} if body.think is None else {"enable_thinking": body.think},
    )
    reader = AnswerReader(
        plan, prompt_ids, call.context.engine.tokenizer, f"call-{call.request_id}", call.context.token_text
    )
    piece = OllamaMessage(reader, shows_thinking=body.think is not False)
    return await _answer(call, body, Writer(call.context, name, piece), prompt_ids, plan)


async def generate(call: Call) -> Response | None:
    body, _ = GENERATE.parse(call.data, unknown=call.context.settings.unknown_fields, notices=call.notices)
    writer = Writer(
        call.context, check_name(call.context, body.model), lambda text, token_ids, last: {"response": text}
    )
    if not body.prompt:
        return call.json(writer.loaded())
    if body.raw:
        return await _answer(call, body, writer, body.prompt)
    messages = [{"role": "user", "content": body.prompt}]
    if body.system is not None:
        messages.insert(0, {"role": "system", "content": body.system})
    return await _answer(call, body, writer, messages)


async def _answer(
    call: Call, body: OllamaBody, writer: Writer, prompt: Prompt, plan: AnswerPlan | None = None
) -> Response | None:
    ask = generation.Ask(
        prompt=prompt,
        params=_params(call, body, plan),
        request_id=f"ollama-{call.request_id}",
        priority=0,
        cache_salt=None,
        deadline=call.context.settings.request_deadline,
    )
    if not body.stream:
        [done] = await generation.generate_all(call, [ask])
        return call.json(writer.last(done, text=done.text, whole=True))
    async with generation.opened(call, [ask]) as [stream]:
        await _stream(call, writer, stream)
    return None


def _params(call: Call, body: OllamaBody, plan: AnswerPlan | None) -> SamplingParams:
    settings = call.context.settings
    _, values = OPTIONS.parse(body.options, unknown=settings.unknown_fields, notices=call.notices)
    if values.get("max_tokens") in (-1, -2):
        del values["max_tokens"]
    if values.get("seed", 0) == -1:
        del values["seed"]
    if body.logprobs:
        values["logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs=true", parameter="top_logprobs", value=body.top_logprobs)
    structured.ask(values, structured.of_ollama(body.format) if plan is None else plan.form)
    if plan is not None and plan.reads:
        values["skip_special_tokens"] = False
    try:
        return generation.sampling_params(values, settings)
    except InvalidRequestError as error:
        theirs = {ours: name for name, ours in OPTIONS.sampling.items()}
        error.parameter = f"options.{theirs.get(error.parameter, error.parameter)}"
        raise


async def _stream(call: Call, writer: Writer, stream: Stream) -> None:
    lines = await call.open_events(kind=JsonLines)
    async for delta in stream:
        if delta.text or delta.logprobs:
            await lines.send(writer.line(delta))
    await lines.send(writer.last(stream.result))
    await lines.finish(b"")


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
