"""`/v1/chat/completions/render` and its inverse: what a chat becomes for the engine, and a reply of what it answered.

Runs in request tasks, or anywhere without an engine: `Renderer.offline(tokenizer, template)`. Owns nothing.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from pydantic import ValidationError
from starlette.responses import Response

from infer.api import structured
from infer.api.answers import AnswerFormats
from infer.api.artifacts import carried, handed_on
from infer.api.context import ApiContext, CallRegister
from infer.api.fields import invalid_field
from infer.api.generate import SAMPLING
from infer.api.monitor import HealthMonitor
from infer.api.openai import chat
from infer.api.openai.chat_writer import ChatWriter
from infer.api.openai.models import check_model
from infer.api.openai.schemas import CHAT, ChatBody
from infer.api.render_schemas import DERENDER, GenerateReply, LogprobEntry, ReplyChoice, ReplyUsage
from infer.api.routing import ApiRoute, Call
from infer.config.engine import EngineConfig
from infer.config.model import GenerationDefaults
from infer.engine.admission import Admitted
from infer.engine.outputs import ChoiceUpdate
from infer.engine.prompts import PromptEncoder
from infer.engine.step import PositionLogprobs, SamplingSpec
from infer.engine.stream import ChoiceText, public_logprobs
from infer.errors import InvalidRequestError
from infer.plugins.manager import build_registry
from infer.text.stop import StopStrings
from infer.types import Choice, Completion, SamplingParams, TokenLogprob, Usage

if TYPE_CHECKING:
    from infer.engine.engine import Engine
    from infer.plugins.registry import Registry
    from infer.plugins.tokenizer import Tokenizer
    from infer.text.chat_template import ChatTemplate

_THEIR_NAME = {ours: name for name, ours in SAMPLING.sampling.items()}


def routes(context: ApiContext) -> list[ApiRoute]:
    renderer = Renderer(context)

    async def render(call: Call) -> Response:
        return call.json(await renderer.render(call.data, request_id=call.request_id, notices=call.notices))

    async def derender(call: Call) -> Response:
        return call.json(renderer.derender(call.data, notices=call.notices))

    path = "/v1/chat/completions"
    return [
        ApiRoute(
            method="POST", path=f"{path}/render", handler=render, body=CHAT, summary="A chat as /inference/v1/generate"
        ),
        ApiRoute(
            method="POST", path=f"{path}/derender", handler=derender, body=DERENDER, summary="Its answer as a chat's"
        ),
    ]


@dataclass(frozen=True, slots=True)
class ModelText:
    """What templating and parsing need of an engine."""

    config: EngineConfig
    tokenizer: Tokenizer
    prompts: PromptEncoder
    max_model_len: int
    defaults: GenerationDefaults
    registry: Registry


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the chat endpoint's functions need of a call."""

    context: ApiContext
    notices: list[str] = field(default_factory=list)


class Renderer:
    """The chat endpoint in two halves; its own functions do the work, so that both give the same."""

    def __init__(self, context: ApiContext, defaults: GenerationDefaults | None = None) -> None:
        self._context = context
        self._defaults = defaults

    @classmethod
    def offline(
        cls,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        config: EngineConfig | None = None,
        max_model_len: int = 2**31 - 1,
        defaults: GenerationDefaults | None = None,
    ) -> Renderer:
        """Without an engine. `defaults`: the checkpoint's generation_config.json."""
        config = config or EngineConfig()
        text = ModelText(
            config,
            tokenizer,
            PromptEncoder(tokenizer, template),
            max_model_len,
            defaults or GenerationDefaults(),
            build_registry(config.plugins),
        )
        engine = cast("Engine", text)
        context = ApiContext(
            engine=engine,
            settings=config.api,
            model_names=config.api.served_model_names or (config.model.ref,),
            key_digests=(),
            calls=CallRegister(1),
            health=HealthMonitor(engine),
            answers=AnswerFormats.of(engine, config.api),
        )
        return cls(context, text.defaults)

    async def render(
        self, data: dict[str, Any], *, request_id: str = "render", notices: list[str] | None = None
    ) -> dict[str, Any]:
        """A chat body to a body of `/inference/v1/generate`, with the prompt's text beside its ids."""
        call = self._call(notices)
        body, values = CHAT.parse(data, unknown=self._context.settings.unknown_fields, notices=call.notices)
        model = check_model(self._context, body.model)
        plan = chat.answer_plan(body, values, call)
        params = chat.chat_params(body, values, call, plan)
        ids = await chat.encode_chat(body, params, call, plan)
        text = self._context.engine.prompts.render(
            chat.chat_messages(body, call, plan),
            tools=chat.template_tools(plan),
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            variables=chat.template_variables(body),
        )
        rendered = {
            "request_id": f"chatcmpl-{request_id}",
            "model": model,
            "prompt_text": text,
            "token_ids": ids,
            "sampling_params": self.sampling_in_force(params),
            "priority": body.priority,
        }
        optional = {"cache_salt": body.cache_salt, "deadline": body.deadline, **carried(data)}
        return rendered | {name: value for name, value in optional.items() if value is not None}

    def derender(self, data: dict[str, Any], *, notices: list[str] | None = None) -> dict[str, Any]:
        """What the engine answered to the chat endpoint's reply."""
        call = self._call(notices)
        policy = self._context.settings.unknown_fields
        body, _ = DERENDER.parse(data, unknown=policy, notices=call.notices)
        reply = _checked(body.generate_response)
        asked, values = CHAT.parse(body.chat_request or {"messages": []}, unknown=policy, notices=call.notices)
        plan = chat.answer_plan(asked, values, call)
        params = chat.chat_params(asked, values, call, plan)
        prompt_ids = tuple(body.prompt_token_ids or reply.prompt_token_ids or ())
        usage = reply.usage or ReplyUsage()
        done = Completion(
            request_id=reply.request_id,
            prompt_token_ids=prompt_ids,
            choices=tuple(self._choice(choice, params, asked, prompt_ids) for choice in reply.choices),
            usage=Usage(
                prompt_tokens=len(prompt_ids) or body.prompt_tokens or usage.prompt_tokens,
                output_tokens=sum(len(choice.token_ids) for choice in reply.choices),
                cached_tokens=(usage.prompt_tokens_details or {}).get("cached_tokens") or 0,
            ),
            sampling=params,
            sampling_defaults=self._silent(params) if body.chat_request else reply.sampling_defaults or {},
            prompt_logprobs=_prompt_logprobs(reply, prompt_ids, params),
        )
        model = check_model(self._context, body.model or asked.model)
        scored = params.logprob_token_ids or ()
        written = ChatWriter(self._context, asked, model, reply.request_id, plan, scored).reply(done)
        for choice, answered in zip(written["choices"], reply.choices, strict=True):
            if answered.seed is None:
                del choice["seed"]
        if asked.return_metrics:
            written["metrics"] = reply.metrics
        written |= {"created": int(time.time()) if reply.created is None else reply.created}
        return handed_on(written, body.generate_response, body.chat_request or {})

    def _call(self, notices: list[str] | None) -> Call:
        return cast("Call", _Asked(self._context, [] if notices is None else notices))

    def sampling_in_force(self, params: SamplingParams) -> dict[str, Any]:
        """As in force: the checkpoint's defaults where the caller was silent; a seed is drawn when it runs."""
        given = {name: getattr(params, name) for name in params.model_fields_set}
        used = self._silent(params) | given
        asked = used.pop("structured_output", None)
        told = {_THEIR_NAME[name]: value for name, value in sorted(used.items()) if value is not None}
        return told if asked is None else told | {"structured_outputs": structured.to_vllm(asked)}

    def _silent(self, params: SamplingParams) -> dict[str, Any]:
        """What the checkpoint's defaults give where the caller was silent."""
        engine = self._context.engine
        defaults = self._defaults or engine.model_config.generation
        if not engine.config.model.use_generation_config:
            return {}
        return {name: value for name, value in defaults.values.items() if name not in params.model_fields_set}

    def _choice(
        self, reply: ReplyChoice, params: SamplingParams, asked: ChatBody, prompt_ids: tuple[int, ...]
    ) -> Choice:
        logprobs: list[PositionLogprobs] = []
        if params.wants_logprobs:
            if reply.logprobs is None or len(reply.logprobs.content) != len(reply.token_ids):
                raise InvalidRequestError(
                    "chat_request asks for log-probabilities, and generate_response has not one entry for each token",
                    parameter="generate_response",
                )
            logprobs = [_position(entry, params) for entry in reply.logprobs.content]
        if reply.text is not None:
            return Choice(
                index=reply.index,
                text=reply.text,
                token_ids=tuple(reply.token_ids),
                finish_reason=reply.finish_reason,
                stop_reason=reply.stop_reason,
                logprobs=public_logprobs(logprobs) if params.wants_logprobs else None,
                seed=reply.seed or 0,
            )
        return self._decoded(reply, params, prompt_ids, logprobs)

    def _decoded(
        self,
        reply: ReplyChoice,
        params: SamplingParams,
        prompt_ids: tuple[int, ...],
        logprobs: list[PositionLogprobs],
    ) -> Choice:
        """The reader of a running request reads the ids, and finds the text and the stop that it would have found."""
        tokenizer = self._context.engine.tokenizer
        admitted = Admitted(
            prompt_ids=prompt_ids,
            specs=(SamplingSpec(seed=reply.seed or 0),) * (reply.index + 1),
            max_tokens=1,
            stop_ids=structured.end_ids(tokenizer, reply.stop_reason),
            params=params,
            defaults={},
        )
        reader = ChoiceText(reply.index, admitted, tokenizer, StopStrings(params.stop))
        reason, matched = reply.finish_reason, reply.stop_reason
        if reason == "length" and matched == "deadline":
            reason, matched = "deadline", None
        by_text = reason == "stop" and isinstance(matched, str)
        update = ChoiceUpdate(reply.index, reply.token_ids, logprobs, [], None if by_text else reason, matched)
        reader.read(update)
        if reader.finish_reason is None:
            raise InvalidRequestError(
                f"stop_reason={matched!r} is not where the text of token_ids ends; give chat_request with its stop",
                parameter="chat_request",
            )
        return reader.choice()


def _checked(data: dict[str, Any]) -> GenerateReply:
    try:
        return GenerateReply.model_validate(data)
    except ValidationError as error:
        inner = invalid_field(error)
        raise InvalidRequestError(
            f"generate_response.{inner}", parameter=f"generate_response.{inner.parameter}", value=inner.value
        ) from None


def _position(entry: LogprobEntry, params: SamplingParams) -> PositionLogprobs:
    others = [(one.rank, one.token_id, one.logprob) for one in entry.top_logprobs if one.token_id != entry.token_id]
    told = {one.token_id: one.logprob for one in (*entry.top_logprobs, entry)}
    top = _best(entry.token_id, entry.logprob, others, params.logprobs or 0)
    kept_ids = None if entry.kept_ids is None else array("i", entry.kept_ids)
    candidates = _candidates(told, params.logprob_token_ids or ())
    return PositionLogprobs(
        entry.token_id, entry.logprob, entry.rank or 1, top, candidates, kept_ids, entry.kept_logmass
    )


def _candidates(told: Mapping[int, float], ids: Sequence[int]) -> tuple[float, ...]:
    missing = next((token_id for token_id in ids if token_id not in told), None)
    if missing is not None:
        raise InvalidRequestError(
            f"chat_request has logprob_token_ids, and a position of generate_response does not score {missing}",
            parameter="generate_response",
        )
    return tuple(told[token_id] for token_id in ids)


def _best(
    token_id: int, logprob: float, others: Sequence[tuple[int | None, int, float]], num_top: int
) -> tuple[tuple[int, float], ...]:
    """The alternatives as the engine had them: a reply moves the position's own token to their front.

    Others bear their places as ranks, so that the missing place is the token's own. Its own rank would not do: equal
    log-probabilities share one.
    """
    placed = sorted((rank, other_id, value) for rank, other_id, value in others if rank is not None)
    ranked = [(other_id, value) for _, other_id, value in placed]
    if len(ranked) < num_top:
        places = {rank for rank, _, _ in placed}
        missing = next(place for place in range(1, len(ranked) + 2) if place not in places)
        ranked.insert(missing - 1, (token_id, logprob))
    return tuple(ranked[:num_top])


def _prompt_logprobs(
    reply: GenerateReply, prompt_ids: Sequence[int], params: SamplingParams
) -> tuple[TokenLogprob | None, ...] | None:
    num_top = params.prompt_logprobs
    if num_top is None:
        return None
    entries = reply.prompt_logprobs
    if entries is None or len(entries) != len(prompt_ids):
        raise InvalidRequestError(
            "chat_request has prompt_logprobs, and generate_response has not one entry for each of prompt_token_ids",
            parameter="generate_response",
        )
    found: list[TokenLogprob | None] = []
    for token_id, entry in zip(prompt_ids, entries, strict=True):
        own = None if entry is None else entry.get(str(token_id))
        if entry is None or own is None:
            found.append(None)
            continue
        others = [(o.rank, int(key), o.logprob) for key, o in entry.items() if key != str(token_id)]
        candidates = _candidates({int(key): o.logprob for key, o in entry.items()}, params.logprob_token_ids or ())
        top = _best(token_id, own.logprob, others, num_top)
        found.append(TokenLogprob(token_id, own.logprob, own.rank or 1, top, candidates))
    return tuple(found)
