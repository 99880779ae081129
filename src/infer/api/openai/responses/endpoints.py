"""The routes of `/v1/responses`: create, retrieve, delete, cancel, and list the input.

Handlers run in request tasks. Owns the list of responses that are being streamed.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import anyio
from starlette.responses import Response

from infer.api.auth import key_owner
from infer.api.context import ApiContext
from infer.api.errors import ApiError
from infer.api.openai import chat, generation
from infer.api.openai.models import check_model
from infer.api.openai.paging import page
from infer.api.openai.progress import silence
from infer.api.openai.responses import request
from infer.api.openai.responses.archive import Archive, unknown
from infer.api.openai.responses.items import Item, chat_messages, read_items
from infer.api.openai.responses.schemas import RESPONSES, ResponsesBody
from infer.api.openai.responses.writer import ResponseEvents, ResponseWriter
from infer.api.routing import ApiRoute, Call
from infer.errors import InvalidRequestError

if TYPE_CHECKING:
    from infer.engine.stream import Stream

CANCEL_SECONDS = 5.0
"""How long a cancel waits for the stream to end; a client that reads its events slowly may take longer."""


def routes(context: ApiContext) -> list[ApiRoute]:
    api = ResponsesApi(context)
    path, one = "/v1/responses", "/v1/responses/{response_id}"
    return [
        ApiRoute(method="POST", path=path, handler=api.create, summary="Make a response", body=RESPONSES),
        ApiRoute(method="GET", path=one, handler=api.retrieve, summary="A stored response"),
        ApiRoute(method="DELETE", path=one, handler=api.delete, summary="Forget a response"),
        ApiRoute(method="POST", path=one + "/cancel", handler=api.cancel, summary="End a stream", optional_body=True),
        ApiRoute(method="GET", path=one + "/input_items", handler=api.input_items, summary="The input of a response"),
    ]


@dataclass(slots=True, kw_only=True)
class Running:
    """A response that is being streamed; only its stream's client knows the id yet."""

    owner: str
    engine_id: str
    response: dict[str, Any]
    items: list[Item]
    ended: anyio.Event = field(default_factory=anyio.Event)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One checked request on its way."""

    owner: str
    writer: ResponseWriter
    items: list[Item]
    ask: generation.Ask
    store: bool


class ResponsesApi:
    """Of one server."""

    def __init__(self, context: ApiContext) -> None:
        self._archive = None if context.responses is None else Archive(context.responses)
        self._running: dict[str, Running] = {}

    # -- create ----------------------------------------------------------------------------------------------------

    async def create(self, call: Call) -> Response | None:
        body, values = RESPONSES.parse(call.data, unknown=call.context.settings.unknown_fields, notices=call.notices)
        with request.client_names(body):
            job = await self._job(call, body, values)
            if body.stream:
                async with generation.opened(call, [job.ask]) as [stream]:
                    with self._listed(job):
                        await self._stream(call, job, stream)
                return None
            [done] = await generation.generate_all(call, [job.ask])
        job.writer.begin(done.seed, done.sampling_defaults)
        job.writer.feed(done.text, done.token_ids, done.logprobs, last=True)
        job.writer.end(done)
        await self._keep(job)
        return call.json(job.writer.response)

    async def _job(self, call: Call, body: ResponsesBody, values: dict[str, Any]) -> Job:
        """Everything that can be refused before the engine is asked."""
        context = call.context
        model = check_model(context, body.model)
        store = self._stores(body)
        owner = key_owner(call.headers, context.key_digests)
        call.notices += request.notices(body)
        items = read_items(body.input, call.notices)
        history = await self._history(owner, body.previous_response_id)
        asked = request.chat_body(body, chat_messages([*history, *items], body.instructions))
        if body.max_output_tokens is not None:
            values["max_tokens"] = body.max_output_tokens
        plan = chat.answer_plan(asked, values, call)
        params = chat.chat_params(asked, values, call, plan)
        prompt_ids = await chat.encode_chat(asked, params, call, plan)
        response_id = f"resp_{uuid.uuid4().hex}"  # never used twice, whatever the client calls its requests
        [ask] = generation.make_asks(call, "resp", [prompt_ids], params, asked)
        ask = replace(ask, request_id=response_id)
        echo = {**request.told_back(body), "store": store}
        writer = ResponseWriter(context, response_id, model, echo, plan, params, prompt_ids)
        return Job(owner=owner, writer=writer, items=items, ask=ask, store=store)

    async def _history(self, owner: str, response_id: str | None) -> list[Item]:
        if response_id is None:
            return []
        running = self._running.get(response_id)
        if running is not None and running.owner == owner:
            raise ApiError(
                f"Previous response with id {response_id[:100]!r} is still in progress; wait for its last event",
                code="previous_response_in_progress",
                parameter="previous_response_id",
            )
        return await self._kept().conversation(owner, response_id)

    async def _stream(self, call: Call, job: Job, stream: Stream) -> None:
        writer = job.writer
        writer.begin(stream.seeds[0], stream.sampling_defaults)
        events = await call.open_events(comment=lambda: silence([stream]), kind=ResponseEvents)
        if isinstance(events, ResponseEvents):
            events.writer = writer
        await _send(events, writer.opening())
        async for delta in generation.Deltas(stream):
            last = delta.finish_reason is not None
            await _send(events, writer.feed(delta.text, delta.token_ids, delta.logprobs, last=last))
        ending = writer.end(stream.result)
        await self._keep(job)
        self._running[writer.response["id"]].ended.set()
        await _send(events, [*ending, writer.closing()])
        await events.finish(b"")

    async def _keep(self, job: Job) -> None:
        if job.store:
            await self._kept().keep(job.owner, job.writer.response, job.items)

    @contextmanager
    def _listed(self, job: Job) -> Iterator[None]:
        response = job.writer.response
        running = Running(owner=job.owner, engine_id=job.ask.request_id, response=response, items=job.items)
        self._running[response["id"]] = running
        try:
            yield
        finally:
            del self._running[response["id"]]
            running.ended.set()

    # -- what there is ---------------------------------------------------------------------------------------------

    async def retrieve(self, call: Call) -> Response:
        for name in ("stream", "starting_after"):
            if call.query.get(name, "false") != "false":
                raise ApiError(
                    f"{name} is not supported: a response that is over is not streamed again", parameter=name
                )
        _check_include(call)
        return call.json((await self._found(call))[0])

    async def delete(self, call: Call) -> Response:
        response_id = call.path["response_id"]
        if self._own_running(call) is not None:
            raise ApiError(
                f"response {response_id} is in progress; cancel it, or wait for its end",
                status=409,
                code="response_in_progress",
            )
        await self._kept(response_id).forget(key_owner(call.headers, call.context.key_digests), response_id)
        return call.json({"id": response_id, "object": "response.deleted", "deleted": True})

    async def cancel(self, call: Call) -> Response:
        running = self._own_running(call)
        if running is None:
            response, _ = await self._found(call)
        else:
            call.context.engine.abort(running.engine_id)
            with anyio.move_on_after(CANCEL_SECONDS):
                await running.ended.wait()
            response = running.response
        if running is None and response["status"] != "cancelled":
            raise ApiError(
                f"response {response['id']} is {response['status']}: only one that is being streamed can be cancelled",
                code="response_is_over",
                parameter="response_id",
            )
        return call.json(response)

    async def input_items(self, call: Call) -> Response:
        _check_include(call)
        order = call.query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise ApiError(f"order={order[:20]!r} is neither asc nor desc", parameter="order")
        _, items = await self._found(call)
        return call.json(page(items if order == "asc" else items[::-1], call, default=20, most=100))

    async def _found(self, call: Call) -> tuple[dict[str, Any], list[Item]]:
        running = self._own_running(call)
        if running is not None:
            return running.response, running.items
        response_id = call.path["response_id"]
        kept = await self._kept(response_id).find(key_owner(call.headers, call.context.key_digests), response_id)
        return kept.response, kept.items

    def _own_running(self, call: Call) -> Running | None:
        running = self._running.get(call.path["response_id"])
        mine = running is not None and running.owner == key_owner(call.headers, call.context.key_digests)
        return running if mine else None

    # -- the store -------------------------------------------------------------------------------------------------

    def _stores(self, body: ResponsesBody) -> bool:
        if self._archive is not None:
            return body.store is not False
        if body.store:
            raise InvalidRequestError(
                "store=true is not supported: the server keeps no responses (api.responses_max_count=0)",
                parameter="store",
                value=True,
            )
        return False

    def _kept(self, response_id: str | None = None) -> Archive:
        if self._archive is not None:
            return self._archive
        if response_id is not None:
            raise unknown(response_id)
        raise ApiError(
            "the server keeps no responses (api.responses_max_count=0); send the whole conversation as input",
            code="previous_response_not_found",
            parameter="previous_response_id",
        )


def _check_include(call: Call) -> None:
    """What was told is told again: there is nothing to add."""
    for name in (*call.query.getlist("include"), *call.query.getlist("include[]")):
        if name not in (request.LOGPROBS, request.ENCRYPTED):
            raise ApiError(f"include={name[:100]!r} is not supported", parameter="include")


async def _send(events: Any, made: Sequence[dict[str, Any]]) -> None:
    for event in made:
        await events.send(event)
