"""HTTP routes: POST /my-name answers a prompt and counts the words of the answer, as a reply or as an event.

Handlers run in request tasks; keys, limits, errors and metrics are the server's. Owns nothing.
"""

from __future__ import annotations

from infer import InvalidRequestError, SamplingParams
from infer.plugins import EndpointCall, EndpointReply, EndpointRoute, EndpointServer, EndpointSpec, hookimpl


class CountWords:
    def __init__(self, server: EndpointServer) -> None:
        self._engine, self._model = server.engine, server.model_names[0]
        self._params = SamplingParams(max_tokens=server.options["max_tokens"], temperature=0)

    async def count(self, call: EndpointCall) -> EndpointReply | None:
        prompt, stream = call.data.get("prompt"), call.data.get("stream", False)
        if not isinstance(prompt, str) or not prompt:
            raise InvalidRequestError("prompt must be text, not empty", parameter="prompt", value=prompt)
        if not isinstance(stream, bool):
            raise InvalidRequestError("stream must be true or false", parameter="stream", value=stream)
        if stream:
            await self._stream(call, prompt)
            return None  # ends the stream
        done = await self._engine.generate(prompt, self._params, request_id=call.request_id)
        return EndpointReply(data={"model": self._model, "words": len(done.text.split())})

    async def _stream(self, call: EndpointCall, prompt: str) -> None:
        async with self._engine.stream(prompt, self._params, request_id=call.request_id) as answer:
            events = await call.open_events()
            text = ""
            async for delta in answer:
                text += delta.text
            await events.send({"model": self._model, "words": len(text.split())})


def create(server: EndpointServer) -> list[EndpointRoute]:
    handler = CountWords(server).count
    return [EndpointRoute(method="POST", path="/my-name", handler=handler, summary="Words of an answer")]


CALLS = [  # the kit makes them of a server whose model answers "hello" to everything
    {"method": "POST", "path": "/my-name", "data": {"prompt": "Hi"}, "reply": {"model": "kit", "words": 1}},
    {"method": "POST", "path": "/my-name", "data": {"prompt": "Hi", "stream": True}, "events": 1},
    {"method": "POST", "path": "/my-name", "data": {"prompt": ""}, "status": 400},
]


@hookimpl
def infer_endpoints() -> list[EndpointSpec]:
    return [
        EndpointSpec(
            name="my-name",
            api=1,
            factory=f"{__name__}:create",
            example={"calls": CALLS},
            options={"max_tokens": 16},  # api.endpoint_options={"my-name": {"max_tokens": 64}} gives it another
        )
    ]
