"""What chat and completions share: sampling values, prompts cut to length, and runs of one or several prompts.

Runs in request tasks.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import anyio

from infer.api.errors import ApiError, unwrap
from infer.api.routing import Call
from infer.errors import ArtifactError, InvalidRequestError
from infer.options import MAX_BEAM_WIDTH
from infer.types import Completion, Delta, Prompt, SamplingParams

if TYPE_CHECKING:
    from infer.api.openai.schemas import GenerationBody
    from infer.artifacts.request import ArtifactRequest
    from infer.config.engine import ApiSection
    from infer.engine.stream import Stream

_NUMBERS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "seed",
    "min_tokens",
)
_FINISH = {"deadline": "length", "error": "stop"}
"""Engine's word -> OpenAI's; `stop_reason` keeps the engine's. Others are sent as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One prompt of a call, ready for the engine."""

    prompt: Prompt
    params: SamplingParams
    request_id: str
    priority: int
    cache_salt: str | None
    deadline: float | None
    artifact: ArtifactRequest | None = None


def sampling_params(values: dict[str, Any], settings: ApiSection) -> SamplingParams:
    """Typed and checked. Raises `InvalidRequestError` naming the field."""
    for name in _NUMBERS:
        if isinstance(values.get(name), str | bool):
            raise InvalidRequestError(f"{name}={values[name]!r} is not a number", parameter=name, value=values[name])
    if values.get("top_k") == -1:  # vLLM's word for all
        values["top_k"] = 0
    if "logit_bias" in values:
        values["logit_bias"] = _biases(values["logit_bias"])
    for name in ("logprobs", "prompt_logprobs"):
        count = values.get(name)
        if isinstance(count, int) and not isinstance(count, bool) and count > settings.max_logprobs:
            raise InvalidRequestError(
                f"{name}={count} is more than api.max_logprobs={settings.max_logprobs}", parameter=name, value=count
            )
    params = SamplingParams(**values)
    _check_facts(params, settings)
    return params


def _check_facts(params: SamplingParams, settings: ApiSection) -> None:
    """What is told of every token must have a bound, or one request could fill the memory."""
    ids, kept = params.logprob_token_ids or (), params.top_k or 2**31
    if len(ids) > settings.max_logprob_token_ids:
        raise InvalidRequestError(
            f"logprob_token_ids has {len(ids)} ids, more than api.max_logprob_token_ids={settings.max_logprob_token_ids}",
            parameter="logprob_token_ids",
            value=len(ids),
        )
    if params.return_kept_set and params.temperature > 0 and kept > settings.max_kept_ids:
        raise InvalidRequestError(
            f"return_kept_set with top_k={params.top_k}: top_p and min_p alone may keep the whole vocabulary; give a top_k of "
            f"1 to {settings.max_kept_ids} (api.max_kept_ids)",
            parameter="top_k",
            value=params.top_k,
        )


def _biases(value: Any) -> dict[int, Any]:
    """JSON keys are strings; ids are numbers."""
    if not isinstance(value, dict) or not all(key.isdecimal() and key.isascii() and len(key) < 11 for key in value):
        raise InvalidRequestError(
            "logit_bias must be an object from token ids to numbers", parameter="logit_bias", value=None
        )
    return {int(key): bias for key, bias in value.items()}


def ask_for_beams(body: GenerationBody, values: dict[str, Any]) -> None:
    """`use_beam_search` and what belongs to it, as sampling values. Call it before `sampling_params`."""
    if not body.use_beam_search:
        for name in ("beam_width", "length_penalty"):
            if getattr(body, name) != type(body).model_fields[name].default:
                raise InvalidRequestError(
                    f"{name}={getattr(body, name)} needs use_beam_search=true",
                    parameter=name,
                    value=getattr(body, name),
                )
        return
    if body.stream:
        raise InvalidRequestError(
            "beam search cannot be streamed: which beams are best is known at the end", parameter="stream", value=True
        )
    count = values.get("n", 1)
    if getattr(body, "best_of", None) not in (None, count):
        raise InvalidRequestError(
            "best_of does not apply to beam search; say with beam_width how many answers are kept at every token",
            parameter="best_of",
            value=None,
        )
    width = body.beam_width or (count if type(count) is int and count > 0 else 1)  # a wrong n is refused as n
    if width > MAX_BEAM_WIDTH:
        raise InvalidRequestError(
            f"n={width}: a beam search has at most {MAX_BEAM_WIDTH} beams", parameter="n", value=width
        )
    values["beam"] = {"width": width, "length_penalty": body.length_penalty}


def check_stream_options(body: GenerationBody, call: Call) -> tuple[bool, bool]:
    """(usage in a last chunk, usage in every chunk)."""
    options = body.stream_options
    if options is not None and not body.stream:
        raise InvalidRequestError(
            "stream_options need stream=true", parameter="stream_options", value=options.model_dump(exclude_none=True)
        )
    if options is not None and options.include_obfuscation:
        call.notices.append("stream_options.include_obfuscation: chunks are not padded")
    include = bool(options is not None and options.include_usage)
    continuous = include and bool(options is not None and options.continuous_usage_stats)
    return include or call.context.settings.force_include_usage, continuous


def cut_prompt(ids: list[int], body: GenerationBody, call: Call, max_tokens: int | None) -> list[int]:
    """`truncate_prompt_tokens`: the first or the last so many."""
    limit = body.truncate_prompt_tokens
    if limit is None:
        return ids
    if limit == -1:
        limit = max(1, call.context.engine.max_model_len - (max_tokens or 1))
    if limit == 0:
        raise InvalidRequestError(
            "truncate_prompt_tokens=0 leaves no prompt", parameter="truncate_prompt_tokens", value=0
        )
    if len(ids) <= limit:
        return ids
    return ids[:limit] if body.truncation_side == "right" else ids[-limit:]


def deadline_of(body: GenerationBody, settings: ApiSection) -> float | None:
    """The earlier of the client's and the operator's."""
    stated = [value for value in (body.deadline, settings.request_deadline) if value is not None]
    return min(stated) if stated else None


def make_asks(
    call: Call,
    prefix: str,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    body: GenerationBody,
    artifact: ArtifactRequest | None = None,
) -> list[Ask]:
    """Request ids are the reply's id, numbered when there are several prompts."""
    base = f"{prefix}-{call.unique_id}"
    return [
        Ask(
            prompt=prompt,
            params=params,
            request_id=base if len(prompts) == 1 else f"{base}-{index}",
            priority=body.priority,
            cache_salt=body.cache_salt,
            deadline=deadline_of(body, call.context.settings),
            artifact=artifact,
        )
        for index, prompt in enumerate(prompts)
    ]


@contextmanager
def renamed(names: Mapping[str, str], place: str) -> Iterator[None]:
    """Refusals of a sampling parameter say the name that the route has for it."""
    try:
        yield
    except InvalidRequestError as error:
        if error.parameter in names:
            error.parameter = f"{place}.{names[error.parameter]}"
        raise


async def generate_all(call: Call, asks: Sequence[Ask]) -> list[Completion]:
    """All at once, in order. The first failure ends the others and is raised."""
    engine = call.context.engine
    if len(asks) == 1:
        return [await engine.generate(asks[0].prompt, asks[0].params, **_arguments(asks[0]))]
    done: list[Completion | None] = [None] * len(asks)

    async def one(index: int, ask: Ask) -> None:
        done[index] = await engine.generate(ask.prompt, ask.params, **_arguments(ask))

    await at_once([lambda i=i, ask=ask: one(i, ask) for i, ask in enumerate(asks)])  # type: ignore[misc]
    return [completion for completion in done if completion is not None]


@asynccontextmanager
async def opened(call: Call, asks: Sequence[Ask]) -> AsyncIterator[list[Stream]]:
    """The streams of all prompts, admitted: what can be refused is refused before the reply begins."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(call.context.engine.stream(ask.prompt, ask.params, **_arguments(ask)))
            for ask in asks
        ]


class Deltas:
    """A stream's deltas; the very last one comes when the stream has its result, its artifact's receipt included.

    A strict artifact that failed is raised behind it: the tokens are the client's.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._open = len(stream.seeds)
        self._failure: ArtifactError | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        if self._failure is not None:
            raise self._failure
        delta = await self._stream.__anext__()
        if delta.finish_reason is not None:
            self._open -= 1
            if not self._open:
                try:
                    await self._stream.__anext__()
                except StopAsyncIteration:
                    pass
                except ArtifactError as error:
                    self._failure = error
        return delta


async def read_all(streams: Sequence[Stream], on_delta: Callable[[int, Delta], Awaitable[None]]) -> None:
    """Read every stream to its end, each at its own pace."""

    async def one(index: int) -> None:
        async for delta in Deltas(streams[index]):
            await on_delta(index, delta)

    if len(streams) == 1:
        await one(0)
    else:
        await at_once([lambda i=i: one(i) for i in range(len(streams))])  # type: ignore[misc]


async def at_once(jobs: Sequence[Callable[[], Coroutine[Any, Any, None]]]) -> None:
    """Run all; the first failure cancels the rest and is raised as itself."""
    try:
        async with anyio.create_task_group() as tasks:
            for job in jobs:
                tasks.start_soon(job)
    except BaseExceptionGroup as group:
        raise unwrap(group) from group


def finish(reason: str | None, stop_reason: int | str | None) -> tuple[str | None, int | str | None]:
    """(finish_reason, stop_reason) as replies say them."""
    if reason in _FINISH:
        return _FINISH[reason], reason
    return reason, stop_reason


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None = None) -> dict[str, Any]:
    counts: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if cached_tokens is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    return counts


def check_choices(asked: int, prompts: int) -> None:
    """One call must not fill the engine's queue by itself."""
    if asked * prompts > MAX_CHOICES:
        raise ApiError(f"{prompts} prompts x {asked} choices are more than {MAX_CHOICES} in one request", parameter="n")


MAX_CHOICES = 4096


def _arguments(ask: Ask) -> dict[str, Any]:
    return {
        "request_id": ask.request_id,
        "priority": ask.priority,
        "cache_salt": ask.cache_salt,
        "deadline": ask.deadline,
        "artifact": ask.artifact,
    }
