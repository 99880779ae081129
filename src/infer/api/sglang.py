"""`/generate` in SGLang's shape: text or token ids, one prompt or a batch, whole or as a growing stream.

Runs in request tasks. The fields and their checks are `api.sglang_schemas`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from infer.api import structured
from infer.api.artifacts import Wanted, sglang_routes, wanted
from infer.api.context import ApiContext
from infer.api.health import check_health
from infer.api.openai import generation
from infer.api.openai.logprobs import LOWEST
from infer.api.routing import ApiRoute, Call
from infer.api.sglang_schemas import GENERATE, MAX_NEW_TOKENS, SAMPLING, GenerateBody
from infer.errors import InvalidRequestError
from infer.text.token_ids_only import NoTokenizer
from infer.types import Choice, Completion, Delta, Prompt, SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from infer.engine.stream import Stream

WEIGHT_VERSION = "default"
"""Of weights that were loaded at start and never replaced."""
_THEIR_NAME = {ours: name for name, ours in SAMPLING.sampling.items()} | {"structured_output": "json_schema"}


def routes(context: ApiContext) -> list[ApiRoute]:
    return [
        ApiRoute(method="POST", path="/generate", handler=generate, summary="SGLang's generate", body=GENERATE),
        ApiRoute(
            method="GET",
            path="/health_generate",
            handler=health_generate,
            public=True,
            always=True,
            summary="As /health",
        ),
        ApiRoute(method="GET", path="/model_info", handler=model_info, summary="SGLang's model facts"),
        ApiRoute(method="GET", path="/get_model_info", handler=model_info, summary="Older name of /model_info"),
    ]


async def health_generate(call: Call) -> Response:
    """Healthy when a token can be generated."""
    await check_health(call.context)
    return call.json({"status": "ok"})


async def model_info(call: Call) -> Response:
    engine = call.context.engine
    return call.json(
        {
            "model_path": engine.config.model.ref,
            "tokenizer_path": engine.config.model.tokenizer or engine.config.model.ref,
            "is_generation": True,
            "weight_version": WEIGHT_VERSION,
            "max_model_len": engine.max_model_len,
        }
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One prompt of a call."""

    ask: generation.Ask
    prompt_logprobs_from: int | None
    """First prompt position whose log-probability is sent; None: none is."""
    num_top: int
    artifact: Wanted


async def generate(call: Call) -> Response | None:
    body, _ = GENERATE.parse(call.data, unknown=call.context.settings.unknown_fields, notices=call.notices)
    prompts, batched = _prompts(body)
    artifact = wanted(call.data, len(prompts))
    items = [_item(call, body, index, prompt, batched, artifact) for index, prompt in enumerate(prompts)]
    generation.check_choices(max(item.ask.params.n for item in items), len(items))
    if any(item.ask.params.n > 1 for item in items):
        batched = True
    writer = Writer(call.context, body)
    try:
        with generation.renamed(_THEIR_NAME, "sampling_params"):
            return await _answer(call, body, writer, items, batched)
    except InvalidRequestError as error:
        if error.parameter == "routed_experts_prompt_start":
            error.parameter = "routed_experts_start_len"
        raise


async def _answer(
    call: Call, body: GenerateBody, writer: Writer, items: Sequence[Item], batched: bool
) -> Response | None:
    asks = [item.ask for item in items]
    if not body.stream:
        done = await generation.generate_all(call, asks)
        engine = call.context.engine
        replies = [
            writer.whole(item, one, choice, await sglang_routes(engine, one.prompt_token_ids, choice))
            for item, one in zip(items, done, strict=True)
            for choice in one.choices
        ]
        return call.json(replies if batched else replies[0])
    async with generation.opened(call, asks) as streams:
        await _stream(call, writer, items, streams, batched)
    return None


def _prompts(body: GenerateBody) -> tuple[list[Prompt], bool]:
    """The prompts, and whether they came as a batch."""
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequestError("give a prompt in either text or input_ids", parameter="input_ids")
    given: Any = body.text if body.input_ids is None else body.input_ids
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        return [given], False
    if not given or not all(given):
        name = "text" if body.input_ids is None else "input_ids"
        raise InvalidRequestError(f"{name} holds an empty prompt", parameter=name, value=given)
    return list(given), True


def _item(call: Call, body: GenerateBody, index: int, prompt: Prompt, batched: bool, artifact: Wanted) -> Item:
    """What is asked of prompt `index`: fields given as lists have one value per prompt."""

    def own(name: str) -> Any:
        value = getattr(body, name)
        if not isinstance(value, list):
            return value
        if index >= len(value):
            raise InvalidRequestError(f"{name} has {len(value)} values for more prompts", parameter=name, value=None)
        return value[index]

    wants, start, num_top = bool(own("return_logprob")), own("logprob_start_len"), own("top_logprobs_num") or 0
    scored = _scored_ids(body, index)
    first = start if wants and start is not None and start >= 0 else None
    values: dict[str, Any] = {
        "logprobs": num_top if wants else None,
        "prompt_logprobs": None if first is None else num_top,
        "logprob_token_ids": scored if wants else None,
        "return_routed_experts": bool(own("return_routed_experts")) or None,
        "routed_experts_prompt_start": own("routed_experts_start_len") or None,
    }
    params = _sampling(call, own("sampling_params") or {}, values)
    if wants and params.temperature not in (0.0, 1.0):
        call.notices.append("return_logprob: log-probabilities are the model's at temperature 1, before any processor")
    rid = body.rid or call.request_id
    name = rid[index] if isinstance(rid, list) and index < len(rid) else f"{rid}_{index}" if batched else rid
    salt = "/".join(part for part in (body.cache_salt, own("extra_key")) if part) or None
    ask = generation.Ask(
        prompt=prompt,
        params=params,
        request_id=name if isinstance(name, str) else name[0],
        priority=body.priority,
        cache_salt=salt,
        deadline=call.context.settings.request_deadline,
        artifact=artifact.request,
    )
    return Item(ask=ask, prompt_logprobs_from=first, num_top=num_top, artifact=artifact)


def _scored_ids(body: GenerateBody, index: int) -> list[int] | None:
    """`token_ids_logprob` of prompt `index`: one list for all, or one for each."""
    given: Any = body.token_ids_logprob
    if given and isinstance(given[0], list):
        if index >= len(given):
            raise InvalidRequestError(
                f"token_ids_logprob has {len(given)} lists for more prompts", parameter="token_ids_logprob", value=None
            )
        given = given[index]
    return given or None


def _sampling(call: Call, data: dict[str, Any], logprobs: dict[str, Any]) -> SamplingParams:
    settings = call.context.settings
    try:
        body, values = SAMPLING.parse(data, unknown=settings.unknown_fields, notices=call.notices)
        structured.ask(values, structured.of_sglang(body.model_dump()))
        if "max_new_tokens" not in data:
            values["max_tokens"] = MAX_NEW_TOKENS
        values |= {name: count for name, count in logprobs.items() if count is not None}
        return generation.sampling_params(values, settings)
    except InvalidRequestError as error:
        error.parameter = f"sampling_params.{_THEIR_NAME.get(error.parameter, error.parameter)}"
        raise


class Writer:
    """Writes replies, or the growing replies of a stream."""

    def __init__(self, context: ApiContext, body: GenerateBody) -> None:
        self._has_text = not isinstance(context.engine.tokenizer, NoTokenizer)
        if body.return_text_in_logprobs and not self._has_text:
            raise InvalidRequestError(
                "return_text_in_logprobs needs a tokenizer, and none is loaded (model.skip_tokenizer=True)",
                parameter="return_text_in_logprobs",
                value=True,
            )
        self._token_text: Callable[[int], str | None] = (
            context.token_text if body.return_text_in_logprobs else lambda token_id: None
        )

    def whole(self, item: Item, done: Completion, choice: Choice, routes: dict[str, Any]) -> dict[str, Any]:
        meta = self._meta(item, choice, len(done.prompt_token_ids), choice.seed, done.sampling_defaults)
        meta |= routes
        meta["cached_tokens"] = done.usage.cached_tokens
        timings = done.timings
        if timings is not None:
            meta |= {
                "e2e_latency": timings.total,
                "queue_time": timings.queued,
                "prefill_time": timings.prefill,
                "decode_time": timings.decode,
                "total_retractions": timings.num_preemptions,
            }
        reply = self._reply(choice, meta | self._prompt(item, done.prompt_token_ids, done.prompt_logprobs))
        return reply | item.artifact.keys(done)

    def partial(
        self, item: Item, stream: Stream, choice: Choice, ended: bool, routes: dict[str, Any]
    ) -> dict[str, Any]:
        seed = stream.seeds[choice.index]
        meta = self._meta(item, choice, len(stream.prompt_token_ids), seed, stream.sampling_defaults)
        if not ended:
            meta["finish_reason"] = None
        meta |= routes
        return self._reply(choice, meta | self._prompt(item, stream.prompt_token_ids, stream.prompt_logprobs))

    def _reply(self, choice: Choice, meta: dict[str, Any]) -> dict[str, Any]:
        text = {"text": choice.text} if self._has_text else {}
        return {**text, "output_ids": choice.token_ids, "meta_info": meta}

    def _meta(
        self, item: Item, choice: Choice, prompt_tokens: int, seed: int, defaults: dict[str, Any]
    ) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": item.ask.request_id,
            "finish_reason": finish_reason(choice),
            "prompt_tokens": prompt_tokens,
            "completion_tokens": len(choice.token_ids),
            "weight_version": WEIGHT_VERSION,
            "sampling_seed": seed,
            "sampling_defaults": {_THEIR_NAME.get(name, name): value for name, value in defaults.items()},
        }
        if choice.logprobs is not None:
            meta["output_token_logprobs"] = [self._triple(e.token_id, e.logprob) for e in choice.logprobs]
            if item.num_top:
                meta["output_top_logprobs"] = [self._top(entry) for entry in choice.logprobs]
            if item.ask.params.logprob_token_ids:
                meta["output_token_ids_logprobs"] = [self._scored(item, entry) for entry in choice.logprobs]
        return meta

    def _prompt(
        self, item: Item, prompt_ids: Sequence[int], entries: Sequence[TokenLogprob | None] | None
    ) -> dict[str, Any]:
        """From the asked position on; as in SGLang the first entry has no value."""
        first = item.prompt_logprobs_from
        if first is None or entries is None:
            return {"input_token_logprobs": []} if item.ask.params.logprobs is not None else {}
        shown: list[TokenLogprob | None] = [None, *entries[first + 1 :]]
        ids = prompt_ids[first:]
        found: dict[str, Any] = {
            "input_token_logprobs": [
                self._triple(token_id, None if entry is None else entry.logprob)
                for token_id, entry in zip(ids, shown, strict=True)
            ]
            if ids
            else []
        }
        if item.num_top:
            found["input_top_logprobs"] = [None if entry is None else self._top(entry) for entry in shown[: len(ids)]]
        if item.ask.params.logprob_token_ids:
            found["input_token_ids_logprobs"] = [
                None if entry is None else self._scored(item, entry) for entry in shown[: len(ids)]
            ]
        return found

    def _triple(self, token_id: int, logprob: float | None) -> list[Any]:
        return [None if logprob is None else max(logprob, LOWEST), token_id, self._token_text(token_id)]

    def _scored(self, item: Item, entry: TokenLogprob) -> list[list[Any]]:
        ids = item.ask.params.logprob_token_ids or ()
        return [self._triple(token_id, value) for token_id, value in zip(ids, entry.candidates, strict=True)]

    def _top(self, entry: TokenLogprob) -> list[list[Any]]:
        return [self._triple(token_id, value) for token_id, value in entry.top]


def finish_reason(choice: Choice) -> dict[str, Any]:
    """SGLang's object. What ended a request from outside is an abort: its clients ask again with what they have."""
    reason, matched = choice.finish_reason, choice.stop_reason
    if reason == "stop":
        if matched is None and choice.token_ids:
            matched = choice.token_ids[-1]  # the end-of-sequence token
        return {"type": "stop", "matched": matched}
    if reason == "length":
        return {"type": "length", "length": len(choice.token_ids)}
    return {"type": "abort", "message": f"ended by {reason}", "status_code": None, "err_type": None}


class Growing:
    """A choice so far: SGLang's chunks each hold everything up to now."""

    def __init__(self) -> None:
        self._text = ""
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] | None = None

    def add(self, delta: Delta) -> Choice:
        self._text += delta.text
        self._ids += delta.token_ids
        if delta.logprobs is not None:
            self._logprobs = [*(self._logprobs or ()), *delta.logprobs]
        return Choice(
            index=delta.choice_index,
            text=self._text,
            token_ids=tuple(self._ids),
            finish_reason=delta.finish_reason or "stop",
            stop_reason=delta.stop_reason,
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
        )


async def _stream(call: Call, writer: Writer, items: Sequence[Item], streams: Sequence[Stream], batched: bool) -> None:
    events = await call.open_events()
    growing: dict[tuple[int, int], Growing] = {}
    first = [sum(item.ask.params.n for item in items[:index]) for index in range(len(items))]

    async def on_delta(index: int, delta: Delta) -> None:
        stream, ended, routes = streams[index], delta.finish_reason is not None, dict[str, Any]()
        choice = growing.setdefault((index, delta.choice_index), Growing()).add(delta)
        if ended:
            done = stream.choice(delta.choice_index)
            routes = await sglang_routes(call.context.engine, stream.prompt_token_ids, done)
        reply = writer.partial(items[index], stream, choice, ended, routes)
        reply |= items[index].artifact.chunk_keys(stream, delta)
        place = {"index": first[index] + delta.choice_index} if batched else {}
        await events.send({**reply, **place})

    await generation.read_all(streams, on_delta)
    await events.finish()
