"""`/inference/v1/generate`: token ids in, token ids out, in vLLM's shape. No tokenizer is touched.

Runs in request tasks. Ids are those the engine sampled, never text encoded again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from starlette.responses import Response

from infer.api import structured
from infer.api.artifacts import ArtifactFields, Wanted, all_vllm_routes, refuse_cancelled, vllm_routes, wanted
from infer.api.context import ApiContext
from infer.api.fields import Body, BodyModel, Unsupported
from infer.api.openai import generation
from infer.api.openai.logprobs import LOWEST, chat_logprobs, kept_set, scored
from infer.api.openai.models import check_model
from infer.api.openai.schemas import MAX_PRIORITY, StreamOptions
from infer.api.routing import ApiRoute, Call
from infer.api.timings import timing_metrics
from infer.errors import InvalidRequestError
from infer.text.token_ids_only import NoTokenizer
from infer.types import Choice, Completion, Delta, SamplingParams, TokenId, TokenLogprob

if TYPE_CHECKING:
    from infer.engine.stream import Stream


class GenerateBody(ArtifactFields):
    token_ids: Annotated[list[TokenId], Field(min_length=1)]
    """The prompt."""
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    """vLLM's sampling parameters; max_tokens absent: up to the context."""
    model: str | None = None
    """One of the served names; absent: the model that is served."""
    request_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Name of the request, for the reply and for aborting it; absent: the header X-Request-Id, or one is made."""
    stream: bool = False
    """Send tokens as server-sent events."""
    stream_options: StreamOptions | None = None
    """include_usage: token counts in a last chunk; continuous_usage_stats: and in every chunk."""
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    """Smaller runs first, with scheduler.policy=priority."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Only requests with the same salt share prefix-cache blocks."""
    deadline: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Seconds after which the request ends with what it has."""
    return_token_ids: bool = False
    """Send the prompt's ids back, too."""
    output_mode: Literal["tokens", "text"] = "tokens"
    """text: with the text of each choice, and of the tokens in its log-probabilities."""


def _any(value: Any) -> bool:
    return True


_LATER = "not there yet"
_TEXT_ONLY = "infer takes text only"

# fmt: off
_SAME_NAMES = (
    "n", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty",
    "frequency_penalty", "presence_penalty", "seed", "stop", "stop_token_ids", "skip_special_tokens", "ignore_eos",
    "repetition_detection", "logit_bias", "allowed_token_ids", "bad_words", "logits_processors", "logprobs",
    "prompt_logprobs", "logprobs_mode", "logprob_token_ids", "return_kept_set", "forced_token_ids", "return_routed_experts",
    "routed_experts_prompt_start",
)
# fmt: on


class SamplingBody(BodyModel):
    structured_outputs: dict[str, Any] | None = None
    """Form of the answer: one of json, json_object, regex, choice, grammar, structural_tag."""


GENERATE = Body(
    name="/inference/v1/generate",
    model=GenerateBody,
    unsupported={
        "prompt_text": Unsupported(note="what /render shows; the prompt is token_ids", harmless=_any),
        "features": Unsupported(note=_TEXT_ONLY),
        "content_parts": Unsupported(note=_TEXT_ONLY),
        "token_offsets": Unsupported(note="has no effect here", refused=False),
        "kv_transfer_params": Unsupported(note=_LATER),
        "ec_transfer_params": Unsupported(note=_LATER),
        "reasoning_ended": Unsupported(note="whether the prompt ends inside reasoning is read from its tokens"),
        "reasoning_parser_kwargs": Unsupported(
            note="the operator names the parser (structured_output.reasoning_parser)"
        ),
        "lora_name": Unsupported(note=_LATER),
        "return_routed_experts": Unsupported(note="give it inside sampling_params"),
        "routed_experts_prompt_start": Unsupported(note="give it inside sampling_params"),
    },
)
SAMPLING = Body(
    name="/inference/v1/generate sampling_params",
    model=SamplingBody,
    sampling={
        **{name: name for name in _SAME_NAMES},
        "include_stop_str_in_output": "include_stop",
        "thinking_token_budget": "thinking_budget",
    },
    unsupported={
        "detokenize": Unsupported(note="see output_mode", harmless=_any),
        "flat_logprobs": Unsupported(note="how vLLM keeps them in memory", harmless=_any),
        "output_kind": Unsupported(note="how vLLM delivers in process", harmless=_any),
        "spaces_between_special_tokens": Unsupported(note="has no effect here", harmless=_any),
        "captured_as": Unsupported(note="captured rows are sent as bytes", harmless=lambda value: value == "rows"),
        "best_of": Unsupported(note="only /v1/completions has it", harmless=lambda value: value == 1),
        "truncate_prompt_tokens": Unsupported(note="send the tokens to be used"),
        "guided_decoding": Unsupported(note="vLLM gave it up for structured_outputs"),
        "return_sampling_mask": Unsupported(note="ask for return_kept_set: the ids that stayed, and their mass"),
        "skip_reading_prefix_cache": Unsupported(note="give a cache_salt of the request's own"),
        "extra_args": Unsupported(note="it belongs to vLLM's plugins, ignored", refused=False),
    },
)


def routes(context: ApiContext) -> list[ApiRoute]:
    return [
        ApiRoute(
            method="POST",
            path="/inference/v1/generate",
            handler=generate,
            summary="Token ids in, token ids out",
            body=GENERATE,
        )
    ]


async def generate(call: Call) -> Response | None:
    settings = call.context.settings
    body, _ = GENERATE.parse(call.data, unknown=settings.unknown_fields, notices=call.notices)
    model = check_model(call.context, body.model)
    usage = generation.check_stream_options(body, call)
    # Here the receipt has one place, whatever the spelling.
    artifact = replace(wanted(call.data), spelling="native")
    try:
        params = token_params(body.sampling_params, call)
        ask = generation.Ask(
            prompt=body.token_ids,
            params=params,
            request_id=body.request_id or call.request_id,
            priority=body.priority,
            cache_salt=body.cache_salt,
            deadline=generation.deadline_of(body, settings),
            artifact=artifact.request,
        )
        writer = GenerateWriter(call.context, body, model, ask.request_id, params.logprob_token_ids or ())
        if not body.stream:
            [done] = await generation.generate_all(call, [ask])
            refuse_cancelled(done.artifact)
            [routes] = await all_vllm_routes(call.context.engine, [done])
            return call.json(writer.reply(done, routes) | artifact.keys(done))
        async with generation.opened(call, [ask]) as [stream]:
            await _stream(call, writer, stream, artifact, usage)
        return None
    except InvalidRequestError as error:
        error.parameter = structured.client_name(error.parameter, body.sampling_params)
        if error.parameter == "prompt":
            error.parameter = "token_ids"
        elif error.parameter in SAMPLING.known():
            error.parameter = f"sampling_params.{error.parameter}"
        raise


def token_params(data: dict[str, Any], call: Call) -> SamplingParams:
    """vLLM's `sampling_params`. Raises `InvalidRequestError` naming the field."""
    settings = call.context.settings
    extra = data.get("extra_args")
    if isinstance(extra, dict) and extra.get("kv_transfer_params") is not None:
        raise InvalidRequestError("kv_transfer_params is not supported: not there yet", parameter="extra_args")
    body, values = SAMPLING.parse(data, unknown=settings.unknown_fields, notices=call.notices)
    structured.ask(values, structured.asked(None, body.structured_outputs))
    return generation.sampling_params(values, settings)


class GenerateWriter:
    """Writes one call's reply, or its chunks."""

    def __init__(
        self, context: ApiContext, body: GenerateBody, model: str, request_id: str, candidate_ids: Sequence[int] = ()
    ) -> None:
        self._text = context.token_text if body.output_mode == "text" else None
        if self._text is not None and isinstance(context.engine.tokenizer, NoTokenizer):
            raise InvalidRequestError(
                "output_mode='text' needs a tokenizer, and none is loaded (model.skip_tokenizer=True)",
                parameter="output_mode",
                value="text",
            )
        self._body = body
        self._candidate_ids = candidate_ids
        self._request_id = request_id
        self._model = model

    def reply(self, done: Completion, routes: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
        """`routes`: choice index -> what it says of its routed experts."""
        counts = done.usage
        reply: dict[str, Any] = {
            "request_id": self._request_id,
            "model": self._model,
            "created": int(time.time()),
            "output_mode": self._body.output_mode,
            "choices": [
                self._choice(choice, choice.index, choice.seed) | routes[choice.index] for choice in done.choices
            ],
            "usage": generation.usage(counts.prompt_tokens, counts.output_tokens, counts.cached_tokens),
            "prompt_logprobs": self._prompt_logprobs(done.prompt_logprobs),
            "kv_transfer_params": None,
            "metrics": timing_metrics(done),
            "sampling_defaults": done.sampling_defaults,
        }
        if self._body.return_token_ids:
            reply["prompt_token_ids"] = done.prompt_token_ids
        return reply

    def chunk(
        self, delta: Delta | None, seed: int | None = None, routes: dict[str, Any] | None = None, **extra: Any
    ) -> dict[str, Any]:
        choices = [] if delta is None else [self._choice(delta, delta.choice_index, seed) | (routes or {})]
        return {"request_id": self._request_id, "output_mode": self._body.output_mode, "choices": choices, **extra}

    def first(self, stream: Stream) -> dict[str, Any]:
        """What the first chunk says of the prompt."""
        told: dict[str, Any] = {"sampling_defaults": stream.sampling_defaults}
        if self._body.return_token_ids:
            told["prompt_token_ids"] = stream.prompt_token_ids
        if stream.prompt_logprobs is not None:
            told["prompt_logprobs"] = self._prompt_logprobs(stream.prompt_logprobs)
        return told

    def _choice(self, choice: Choice | Delta, index: int, seed: int | None) -> dict[str, Any]:
        reason, stop_reason = generation.finish(choice.finish_reason, choice.stop_reason)
        one = {
            "index": index,
            "token_ids": choice.token_ids,
            "finish_reason": reason,
            "stop_reason": stop_reason,
            "logprobs": None if choice.logprobs is None else self._logprobs(choice.logprobs),
        }
        if seed is not None:
            one["seed"] = seed
        if self._text is not None:
            one["text"] = choice.text
        return one

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if self._text is not None:
            return chat_logprobs(entries, self._text, self._text, self._candidate_ids)
        return {"content": [token_entry(entry, self._candidate_ids) for entry in entries]}

    def _prompt_logprobs(self, entries: Sequence[TokenLogprob | None] | None) -> list[Any] | None:
        """vLLM's shape, the prompt's own token first."""
        if entries is None:
            return None
        return [None if entry is None else self._ranked(entry) for entry in entries]

    def _ranked(self, entry: TokenLogprob) -> dict[str, Any]:
        return {
            str(token_id): {
                "logprob": value,
                "rank": rank,
                "decoded_token": None if self._text is None else self._text(token_id),
            }
            for token_id, value, rank in ranked(entry, self._candidate_ids)
        }


def ranked(entry: TokenLogprob, candidate_ids: Sequence[int] = ()) -> list[tuple[int, float, int | None]]:
    """(id, log-probability, rank): the position's own token first, then the others, best first, then the candidates that
    are not among them, whose ranks nobody counted."""
    others: list[tuple[int, float, int | None]] = [
        (token_id, max(value, LOWEST), rank)
        for rank, (token_id, value) in enumerate(entry.top, start=1)
        if token_id != entry.token_id
    ]
    others += [(token_id, max(value, LOWEST), None) for token_id, value in scored(entry, candidate_ids)]
    return [(entry.token_id, max(entry.logprob, LOWEST), entry.rank), *others]


def token_entry(entry: TokenLogprob, candidate_ids: Sequence[int] = ()) -> dict[str, Any]:
    """One position: ids as numbers, and as the "token_id:N" that clients of older vLLM read."""
    shown = [
        {"token_id": token_id, "token": f"token_id:{token_id}", "logprob": value, "rank": rank, "bytes": None}
        for token_id, value, rank in ranked(entry, candidate_ids)
    ]
    return {**shown[0], "top_logprobs": shown if entry.top or candidate_ids else [], **kept_set(entry)}


async def _stream(
    call: Call, writer: GenerateWriter, stream: Stream, artifact: Wanted, usage: tuple[bool, bool]
) -> None:
    last_usage, every_usage = usage
    events = await call.open_events()
    prompt_len, count = len(stream.prompt_token_ids), 0
    untold = dict(enumerate(stream.seeds))
    async for delta in generation.Deltas(stream):
        count += len(delta.token_ids)
        extra: dict[str, Any] = writer.first(stream) if len(untold) == len(stream.seeds) else {}
        seed = untold.pop(delta.choice_index, None)
        if every_usage:
            extra["usage"] = generation.usage(prompt_len, count)
        routes: dict[str, Any] = {}
        if delta.finish_reason is not None:
            ended = stream.choice(delta.choice_index)
            routes = await vllm_routes(call.context.engine, stream.prompt_token_ids, ended)
            if stream.has_result:
                refuse_cancelled(stream.result.artifact)
            extra |= artifact.chunk_keys(stream, delta)
        await events.send(writer.chunk(delta, seed, routes, **extra))
    if last_usage:
        counts = stream.result.usage
        total = generation.usage(counts.prompt_tokens, counts.output_tokens, counts.cached_tokens)
        await events.send(writer.chunk(None, usage=total, metrics=timing_metrics(stream.result)))
    await events.finish()
