"""`/v1/completions`: text or token ids in, their continuations out, whole or as a stream of chunks.

Runs in request tasks.
"""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from infer.api import structured
from infer.api.artifacts import Wanted, all_vllm_routes, vllm_routes, wanted
from infer.api.context import ApiContext
from infer.api.openai import generation
from infer.api.openai.completion_writer import CompletionWriter, Prompted
from infer.api.openai.models import check_model
from infer.api.openai.progress import report_progress, silence
from infer.api.openai.schemas import COMPLETION, CompletionBody
from infer.api.routing import ApiRoute, Call
from infer.errors import InvalidRequestError
from infer.types import Delta, SamplingParams


def routes(context: ApiContext) -> list[ApiRoute]:
    return [
        ApiRoute(
            method="POST",
            path="/v1/completions",
            handler=structured.named(completions),
            summary="Continue prompts",
            body=COMPLETION,
        )
    ]


async def completions(call: Call) -> Response | None:
    settings = call.context.settings
    body, values = COMPLETION.parse(call.data, unknown=settings.unknown_fields, notices=call.notices)
    model = check_model(call.context, body.model)
    wants_usage = generation.check_stream_options(body, call)
    params, num_returned = completion_params(body, values, call)
    prompts = await encode_prompts(body, call)
    generation.check_choices(params.n, len(prompts))
    refused = {"best_of": params.n != num_returned, "max_tokens=0": body.max_tokens == 0}
    artifact = wanted(call.data, len(prompts), refused=refused)
    asks = generation.make_asks(call, "cmpl", [prompt.ids for prompt in prompts], params, body, artifact.request)
    writer = CompletionWriter(
        call.context,
        body,
        model,
        f"cmpl-{call.unique_id}",
        prompts,
        num_returned,
        asks_prompt_logprobs=call.data.get("prompt_logprobs") is not None,
        # Ranking the best of several needs log-probabilities that nobody asked to see.
        shows_logprobs=params.model_copy(update={"logprobs": body.logprobs}).wants_logprobs,
        candidate_ids=params.logprob_token_ids or (),
    )
    if not body.stream:
        done = await generation.generate_all(call, asks)
        routes = await all_vllm_routes(call.context.engine, done)
        return call.json(writer.reply(done, routes) | artifact.keys(done[0]))
    async with generation.opened(call, asks) as streams:
        await _stream(call, body, writer, streams, artifact, wants_usage)
    return None


def completion_params(body: CompletionBody, values: dict[str, Any], call: Call) -> tuple[SamplingParams, int]:
    """Sampling as the body asks for it, and how many choices are returned of those generated."""
    if body.max_tokens == 0 and not (body.echo or values.get("prompt_logprobs") is not None):
        raise InvalidRequestError(
            "max_tokens=0 asks for nothing; it needs echo or prompt_logprobs", parameter="max_tokens", value=0
        )
    if "forced_token_ids" not in values or "max_tokens" in body.model_fields_set:
        values["max_tokens"] = max(1, body.max_tokens)  # one token is computed and not shown
    if body.logprobs is not None:
        values["logprobs"] = body.logprobs
        if body.echo:
            values.setdefault("prompt_logprobs", body.logprobs)
    generation.ask_for_beams(body, values)
    structured.ask(values, structured.asked(body.response_format, body.structured_outputs))
    params = generation.sampling_params(values, call.context.settings)
    num_returned, best_of = params.n, body.best_of
    if best_of is None or best_of == num_returned:
        return params, num_returned
    if best_of < num_returned:
        raise InvalidRequestError(
            f"best_of={best_of} is less than n={num_returned}: so many cannot be chosen from so few",
            parameter="best_of",
            value=best_of,
        )
    if body.stream:
        raise InvalidRequestError(
            f"best_of={best_of} cannot be streamed: the best are known at the end", parameter="best_of", value=best_of
        )
    # Ranking needs each token's log-probability; the reply shows it only if asked.
    return generation.sampling_params(
        {**values, "n": best_of, "logprobs": body.logprobs or 0}, call.context.settings
    ), num_returned


async def encode_prompts(body: CompletionBody, call: Call) -> list[Prompted]:
    """Each prompt as token ids, cut to length if asked, and as the text to echo."""
    given = body.prompt
    prompts: list[Any] = [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)
    encoder, tokenizer = call.context.engine.prompts, call.context.engine.tokenizer
    made = []
    for prompt in prompts:
        ids = await encoder.encode(prompt, add_special_tokens=body.add_special_tokens)
        kept = generation.cut_prompt(ids, body, call, body.max_tokens)
        text = ""
        if body.echo:
            text = prompt if isinstance(prompt, str) and len(kept) == len(ids) else tokenizer.decode(kept)
        made.append(Prompted(ids=kept, text=text))
    return made


async def _stream(
    call: Call,
    body: CompletionBody,
    writer: CompletionWriter,
    streams: list[Any],
    artifact: Wanted,
    wants_usage: tuple[bool, bool],
) -> None:
    """Chunks of all choices as they come, each choice's last with its finish reason, then usage."""
    last_usage, every_usage = wants_usage
    events = await call.open_events(comment=lambda: silence(streams))
    if body.return_progress:
        call.tasks.start_soon(report_progress, events, streams, writer.chunk)
    prompt_len = sum(len(stream.prompt_token_ids) for stream in streams)
    seeds = [stream.seeds for stream in streams]
    count, begun = 0, False

    async def on_delta(prompt_index: int, delta: Delta) -> None:
        nonlocal count, begun
        count += len(delta.token_ids) if body.max_tokens else 0
        stream = streams[prompt_index]
        seed = seeds[prompt_index][delta.choice_index]
        choice = writer.delta(prompt_index, delta, seed, stream.prompt_logprobs)
        if choice is not None:
            extra: dict[str, Any] = {"usage": None} if last_usage else {}
            if not begun:
                begun = True
                extra["sampling_defaults"] = stream.sampling_defaults
            if delta.finish_reason is not None:
                ended = stream.choice(delta.choice_index)
                choice |= await vllm_routes(call.context.engine, stream.prompt_token_ids, ended)
                extra |= artifact.chunk_keys(stream, delta)
            if every_usage:
                extra["usage"] = generation.usage(prompt_len, count)
            await events.write(writer.frame.event(choice, extra))

    await generation.read_all(streams, on_delta)
    done = [stream.result for stream in streams]
    last = writer.metrics(done) | ({"usage": writer.usage(done)} if last_usage else {})
    if last:
        await events.send(writer.chunk([], **last))
    await events.finish()
