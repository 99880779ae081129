"""Conformance of an HTTP endpoint: its routes and its example's calls, hostile bodies, calls side by side, clients that leave,
an engine that refuses or fails. Over a server in this process with a scripted model; needs the extra "server". Owns nothing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
from starlette.types import ASGIApp, Message

from infer.api.app import build_app, build_context
from infer.api.endpoints import open_endpoints
from infer.config.engine import ApiSection, EngineConfig
from infer.engine.engine import Engine
from infer.errors import QueueFullError
from infer.plugins.endpoint import EndpointServer, EndpointSpec
from infer.plugins.options import declaration_problem
from infer.plugins.registry import Kind, KindScan, Origin, Registry
from infer.testing.fake_engine import fake_engine, scripted
from infer.testing.fake_executor import FakeWorker, NextToken
from infer.testing.kits import Check, expect

ANSWER = "hello"
"""What the model answers to every prompt."""
HOSTILE: tuple[Any, ...] = (
    {},
    {"prompt": None},
    {"model": 7, "prompt": [[1.5]], "stream": "no"},
    {"a" * 5000: {"b": [{}] * 100}},
)
SECONDS = 120.0
_METHODS = ("GET", "POST", "DELETE")


@dataclass(frozen=True, slots=True)
class Reply:
    """What a client got."""

    status: int
    body: bytes

    @property
    def events(self) -> list[Any]:
        """Data of the server-sent events, without the end marker."""
        lines = [line[6:] for line in self.body.split(b"\n") if line.startswith(b"data: ")]
        return [json.loads(line) for line in lines if line != b"[DONE]"]


@dataclass(frozen=True, slots=True)
class Bench:
    """One server over one engine."""

    app: ASGIApp
    engine: Engine
    worker: FakeWorker
    routes: tuple[tuple[str, str], ...]


def checks(spec: EndpointSpec) -> Iterator[Check]:
    """The example's calls must be some, and all work."""
    bodies: tuple[Callable[[EndpointSpec, Any], Awaitable[None]], ...] = (
        *(_options, _routes, _answers_its_examples, _refuses_hostile_bodies, _calls_stand_alone, _many_at_once),
        *(_leaves_when_the_client_does, _passes_refusals_on, _survives_a_failed_step),
    )
    yield Check("example", partial(_example, spec))
    for body in bodies:
        for backend in ("asyncio", "trio"):
            yield Check(f"{body.__name__.strip('_')}[{backend}]", partial(_run, body, spec, backend))


def _run(body: Callable[[EndpointSpec, Any], Awaitable[None]], spec: EndpointSpec, backend: str) -> None:
    async def main() -> None:
        with anyio.fail_after(SECONDS):
            await body(spec, spec.example.get("calls", []))

    anyio.run(main, backend=backend)


class _Opened:
    """A server in this process: `async with`."""

    def __init__(
        self, spec: EndpointSpec, next_token: NextToken | None = None, latency: float = 0.0, defaults: bool = False
    ) -> None:
        config = EngineConfig(cache={"num_blocks": 4096}, plugins={"allow": ()})
        self._spec = spec
        self._options = {} if defaults else {spec.name: spec.example.get("options", {})}
        self._workers: list[FakeWorker] = []
        self._engine = fake_engine(
            next_token or scripted(ANSWER), config, latency=latency, on_worker=self._workers.append
        )

    async def __aenter__(self) -> Bench:
        engine = await self._engine.__aenter__()
        try:
            context = build_context(engine, ApiSection(served_model_names=("kit",)))
            server = EndpointServer(engine=engine, model_names=context.model_names)
            routes = open_endpoints(_registry(self._spec), [self._spec.name], server, Counter(), self._options)
            context.endpoint_routes = routes
            pairs = tuple((route.method, route.path) for route in routes)
            return Bench(build_app(context), engine, self._workers[0], pairs)
        except BaseException:
            await self._engine.__aexit__(None, None, None)
            raise

    async def __aexit__(self, *error: Any) -> None:
        await self._engine.__aexit__(*error)


def _registry(spec: EndpointSpec) -> Registry:
    def scan(kind: Kind) -> KindScan:
        return KindScan({spec.name: (spec, Origin("checked", "0"))} if kind == "endpoint" else {}, ())

    return Registry(scan, ())


async def request(app: ASGIApp, method: str, target: str, body: bytes = b"", leave: anyio.Event | None = None) -> Reply:
    """One request, straight into the application. The client goes away when `leave` is set."""
    path, _, query = target.partition("?")
    gone, sent = leave or anyio.Event(), False
    status, chunks = 0, bytearray()

    async def receive() -> Message:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            chunks.extend(message.get("body", b""))

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(b"host", b"kit"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("kit", 80),
    }
    await app(scope, receive, send)
    return Reply(status, bytes(chunks))


async def _call(bench: Bench, call: dict[str, Any], leave: anyio.Event | None = None) -> Reply:
    body = json.dumps(call["data"]).encode() if "data" in call else b""
    return await request(bench.app, call["method"], call["path"], body, leave)


def _example(spec: EndpointSpec) -> None:
    calls = spec.example.get("calls")
    expect(isinstance(calls, list) and calls, 'the example has no "calls"')
    for call in calls or ():
        expect(call.get("method") in _METHODS and str(call.get("path", "")).startswith("/"), f"{call} is no call")


async def _options(spec: EndpointSpec, calls: list[dict[str, Any]]) -> None:
    """They are declared as plain data, and the defaults alone will do."""
    expect(not declaration_problem(spec.options), declaration_problem(spec.options))
    async with _Opened(spec, defaults=True) as bench:
        expect(bench.routes, "without options of its own it has no routes")


async def _routes(spec: EndpointSpec, calls: list[dict[str, Any]]) -> None:
    """They can be made again and again, beside the server's own; the example reaches every one."""
    async with _Opened(spec) as first, _Opened(spec) as second:
        expect(first.routes == second.routes, f"two servers have different routes: {first.routes}, {second.routes}")
        for method, path in first.routes:
            fits = [call for call in calls if call["method"] == method and _fits(call["path"], path)]
            expect(fits, f"no call of the example is of {method} {path}")


def _fits(target: str, path: str) -> bool:
    given, wanted = target.partition("?")[0].split("/"), path.split("/")
    return len(given) == len(wanted) and all(w.startswith("{") or w == g for g, w in zip(given, wanted, strict=True))


async def _answers_its_examples(spec: EndpointSpec, calls: list[dict[str, Any]]) -> None:
    async with _Opened(spec) as bench:
        for call in calls:
            _as_stated(call, await _call(bench, call))
        expect(bench.engine.request_ids == (), f"requests are still running: {bench.engine.request_ids}")


def _as_stated(call: dict[str, Any], reply: Reply) -> None:
    what = f"{call['method']} {call['path']}"
    wanted = call.get("status", 200)
    expect(reply.status == wanted, f"{what} is answered with {reply.status}, not {wanted}: {reply.body[:300]!r}")
    if "reply" in call:
        found = json.loads(reply.body)
        expect(found == call["reply"], f"{what} is answered with {found!r}, not {call['reply']!r}")
    if "events" in call:
        expect(len(reply.events) == call["events"], f"{what} sends {len(reply.events)} events, not {call['events']}")
        expect(reply.body.endswith(b"data: [DONE]\n\n"), f"the stream of {what} has no end marker")


async def _refuses_hostile_bodies(spec: EndpointSpec, calls: list[dict[str, Any]]) -> None:
    """Whatever JSON object comes, it is answered or refused; a defect (status 500) is neither."""
    async with _Opened(spec) as bench:
        for call in calls:
            for data in HOSTILE if "data" in call else ():
                reply = await _call(bench, {**call, "data": data})
                shown = json.dumps(data)[:60]
                expect(
                    reply.status < 500, f"{call['method']} {call['path']} of {shown} is a defect: {reply.body[:300]!r}"
                )
        expect(bench.engine.is_alive and bench.engine.request_ids == (), "a refused request left something running")


async def _calls_stand_alone(spec: EndpointSpec, calls: list[dict[str, Any]]) -> None:
    """In another order they are answered as before."""
    async with _Opened(spec) as bench:
        for call in [*reversed(calls), *calls]:
            _as_stated(call, await _call(bench, call))


async def _many_at_once(spec: EndpointSpec, calls: list[dict[str, Any]]) -> None:
    async with _Opened(spec, latency=0.002) as bench, anyio.create_task_group() as tasks:

        async def one(call: dict[str, Any]) -> None:
            _as_stated(call, await _call(bench, call))

        for call in calls:
            for _ in range(4):
                tasks.start_soon(one, call)


async def _leaves_when_the_client_does(spec: EndpointSpec, calls: list[dict[str, Any]]) -> None:
    """A model that goes on and on: the call ends with its client, and so does what it asked of the engine."""
    async with _Opened(spec, lambda ids, sampling: ord("x"), latency=0.01) as bench, anyio.create_task_group() as tasks:

        async def one(call: dict[str, Any], leave: anyio.Event, ended: anyio.Event) -> None:
            await _call(bench, call, leave)
            ended.set()

        for call in calls:
            leave, ended = anyio.Event(), anyio.Event()
            tasks.start_soon(one, call, leave, ended)
            while not bench.engine.request_ids and not ended.is_set():  # noqa: ASYNC110
                await anyio.sleep(0.001)
            leave.set()
            with anyio.move_on_after(SECONDS / 4):
                await ended.wait()
                while bench.engine.request_ids:  # noqa: ASYNC110
                    await anyio.sleep(0.001)
            left = bench.engine.request_ids
            expect(ended.is_set() and not left, f"{call['method']} {call['path']} goes on without its client: {left}")


async def _passes_refusals_on(spec: EndpointSpec, calls: list[dict[str, Any]]) -> None:
    """A full queue is the client's to know: status 429, not a reply."""
    asked = 0

    def refuse(*given: Any, **named: Any) -> Any:
        nonlocal asked
        asked += 1
        raise QueueFullError("the queue is full", retry_after=1.0)

    async with _Opened(spec) as bench:
        for name in ("generate", "stream", "generate_many"):
            setattr(bench.engine, name, refuse)
        for call in calls:
            before = asked
            reply = await _call(bench, call)
            if asked > before and not _tells_an_error(reply):
                what = f"the engine refused {call['method']} {call['path']}"
                expect(reply.status == 429, f"{what}, and the reply is {reply.status}: {reply.body[:200]!r}")


async def _survives_a_failed_step(spec: EndpointSpec, calls: list[dict[str, Any]]) -> None:
    """The call in it is told, the next one is answered."""
    async with _Opened(spec) as bench:
        for call in calls:
            steps = len(bench.worker.plans)
            bench.worker.fail_at = lambda plan: RuntimeError("a kernel failed")
            reply = await _call(bench, call)
            bench.worker.fail_at = lambda plan: None
            if len(bench.worker.plans) > steps:
                told = reply.status >= 500 or _tells_an_error(reply)
                expect(told, f"a step of {call['method']} {call['path']} failed, and the reply is {reply.status}")
            _as_stated(call, await _call(bench, call))


def _tells_an_error(reply: Reply) -> bool:
    """As the last event of a stream."""
    return bool(reply.events) and "error" in reply.events[-1]
