"""Routes of endpoint plugins: served only when named, behind the key, drained, refused and counted like the server's own."""

from __future__ import annotations

import json
import logging
from typing import Any

import anyio
import pytest

from api_server import HELLO, MODEL, api_settings, events, in_process, on_loopback, open_engine, until
from infer.api.app import all_routes, build_context
from infer.api.endpoints import overlap
from infer.config.engine import EngineConfig
from infer.errors import ConfigError, PluginConflictError, PluginContractError, UnknownPluginError
from planted_plugins import Plant, plant

__all__ = ["plant"]
pytestmark = pytest.mark.anyio

SOURCE = """
    from infer import InvalidRequestError, SamplingParams
    from infer.plugins import *
    import anyio

    async def say(call):
        params = SamplingParams(max_tokens=int(call.path["tokens"]), temperature=0)
        done = await server.engine.generate(call.data["prompt"], params, request_id=call.request_id)
        return EndpointReply(data={"text": done.text, "model": server.model_names[0], "query": call.query},
                             status=201, headers={"x-own": "yes"})

    async def stream(call):
        events = await call.open_events()
        async with server.engine.stream("hi", SamplingParams(max_tokens=5)) as answer:
            async for delta in answer:
                await events.send({"text": delta.text})
        if call.query.get("fail"):
            raise InvalidRequestError("no more", parameter="fail")

    async def raw(call):
        return EndpointReply(body=call.body[::-1], media_type="text/plain")

    async def shows(call):
        return EndpointReply(data=sorted(call.headers))

    async def breaks(call):
        raise KeyError("lost")

    async def forgets(call):
        return {"a": 1}

    async def options(call):
        return EndpointReply(data=server.options)

    async def waits(call):
        await anyio.sleep_forever()

    def make(given):
        global server
        server = given
        return [
            EndpointRoute(method="POST", path="/own/say/{tokens}", handler=say, summary="Says it"),
            EndpointRoute(method="GET", path="/own/stream", handler=stream),
            EndpointRoute(method="POST", path="/own/raw", handler=raw, raw_body=True),
            EndpointRoute(method="GET", path="/own/headers", handler=shows),
            EndpointRoute(method="GET", path="/own/breaks", handler=breaks),
            EndpointRoute(method="GET", path="/own/forgets", handler=forgets),
            EndpointRoute(method="GET", path="/own/options", handler=options),
            EndpointRoute(method="GET", path="/own/waits", handler=waits),
            EndpointRoute(method="DELETE", path="/own/waits", handler=raw),
        ]

    def bad(given):
        return {bad}

    @hookimpl
    def infer_endpoints():
        return [EndpointSpec(name=name, api=1, factory=f"planted_{dist}:{{f}}", example={{}},
                             options={"limit": 5, "words": []}) for name, f in {names}]
"""


def install(plant: Plant, dist: str = "alpha", names: Any = (("own", "make"),), bad: str = "None") -> None:
    body = SOURCE.replace("{bad}", bad).replace("{dist}", dist).replace("{names}", repr(names))
    plant(dist, body.replace("{{f}}", "{f}").replace("{{}}", "{}"))


NAMED = {"endpoints": ("own",)}


async def test_a_route_answers_from_the_engine_and_shows_in_the_description(plant: Plant) -> None:
    install(plant)
    async with in_process(settings=NAMED) as (client, _):
        reply = await client.post("/own/say/5?a=1", json={"prompt": "x"})
        described = (await client.get("/openapi.json")).json()["paths"]["/own/say/{tokens}"]["post"]
    assert reply.status_code == 201
    assert reply.json() == {"text": HELLO[:5], "model": MODEL, "query": {"a": "1"}}
    assert reply.headers["x-own"] == "yes"
    assert reply.headers["x-request-id"]
    assert described["summary"] == "Says it"
    assert described["parameters"][0]["name"] == "tokens"


async def test_options_reach_the_endpoint_over_its_defaults(plant: Plant) -> None:
    install(plant)
    async with in_process(settings={**NAMED, "endpoint_options": {"own": {"words": ["a"]}}}) as (client, _):
        assert (await client.get("/own/options")).json() == {"limit": 5, "words": ["a"]}
    for given, said in (({"own": {"limits": 1}}, "did you mean 'limit'"), ({"own": {"limit": "1"}}, "a whole number")):
        with pytest.raises(ConfigError, match=rf"^api\.endpoint_options: .*{said}"):
            async with in_process(settings={**NAMED, "endpoint_options": given}):
                pass


async def test_an_endpoint_that_the_config_does_not_name_adds_nothing(plant: Plant) -> None:
    install(plant)
    async with in_process() as (client, _):
        reply = await client.post("/own/say/5", json={"prompt": "x"})
    assert reply.status_code == 404


async def test_a_stream_ends_with_the_end_marker_or_with_its_error(plant: Plant) -> None:
    install(plant)
    async with in_process(settings=NAMED) as (client, _):
        whole = events((await client.get("/own/stream")).text)
        broken = events((await client.get("/own/stream?fail=1")).text)
    assert "".join(json.loads(event)["text"] for event in whole[:-1]) == HELLO[:5]
    assert whole[-1] == broken[-1] == "[DONE]"
    assert json.loads(broken[-2])["error"]["param"] == "fail"


async def test_the_key_is_asked_for_and_not_shown_to_the_plugin(plant: Plant) -> None:
    install(plant)
    async with in_process(settings={**NAMED, "api_keys": ("secret",)}) as (client, server):
        refused = await client.get("/own/headers")
        first = await client.get("/own/headers", headers={"authorization": "Bearer secret", "x-other": "1"})
        second = await client.get("/own/headers", headers={"x-api-key": "secret"})
        outcomes = dict(server.contexts[0].endpoint_outcomes)
    assert refused.status_code == 401
    assert "x-other" in first.json()
    assert {"authorization", "x-api-key"}.isdisjoint({*first.json(), *second.json()})
    assert outcomes == {("own", "answered"): 2}


async def test_limits_and_bodies_are_the_servers(plant: Plant) -> None:
    install(plant)
    async with in_process(settings={**NAMED, "max_body_bytes": 1024}) as (client, _):
        assert (await client.post("/own/raw", content=b"abc")).text == "cba"
        assert (await client.post("/own/raw", content=b"x" * 2000)).status_code == 413
        assert (await client.post("/own/say/5", content=b"{")).status_code == 400
        assert (await client.post("/own/say/5", content=b"[1]")).status_code == 400
        assert (await client.post("/own/say/5", json={"prompt": 7})).json()["error"]["param"] == "prompt"
        wrong = await client.put("/own/waits")
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "DELETE, GET")


@pytest.mark.parametrize(
    ("path", "status", "said", "logged"),
    [
        (
            "/own/breaks",
            500,
            "internal error (KeyError)",
            "endpoint 'own' of alpha 1.0: GET /own/breaks raised KeyError('lost')",
        ),
        (
            "/own/forgets",
            500,
            "it must return an EndpointReply",
            "endpoint 'own' of alpha 1.0: the handler of GET /own/forgets returned dict; it must return an EndpointReply, or "
            "None after open_events()",
        ),
    ],
    ids=["raises", "returns"],
)
async def test_a_defect_is_told_by_name_and_the_server_goes_on(
    plant: Plant, caplog: pytest.LogCaptureFixture, path: str, status: int, said: str, logged: str
) -> None:
    install(plant)
    async with in_process(settings=NAMED) as (client, server):
        with caplog.at_level(logging.ERROR, "infer.api"):
            reply = await client.get(path)
        assert (await client.get("/health")).status_code == 200
        page = (await client.get("/metrics")).text
        assert server.contexts[0].endpoint_outcomes == {("own", "failed"): 1}
    assert reply.status_code == status
    assert said in reply.json()["error"]["message"]
    assert logged in [record.getMessage() for record in caplog.records]
    assert f'infer_endpoint_calls_total{{endpoint="own",engine="0",model_name="{MODEL}",outcome="failed"}} 1.0' in page


async def test_stopping_refuses_new_calls_and_cuts_off_the_rest(plant: Plant) -> None:
    import httpx2

    install(plant)
    replies = []
    async with on_loopback(settings={**NAMED, "drain_seconds": 0}) as server:
        async with (
            httpx2.AsyncClient(base_url=server.address, timeout=60) as client,
            anyio.create_task_group() as tasks,
        ):

            async def call() -> None:
                replies.append(await client.get("/own/waits"))

            tasks.start_soon(call)
            await until(lambda: len(server.calls) == 1)
            server.stop.set()
        assert server.contexts[0].endpoint_outcomes == {("own", "cut_off"): 1}
    assert [(reply.status_code, reply.json()["error"]["code"]) for reply in replies] == [(503, "shutting_down")]


async def test_a_client_that_goes_away_frees_what_the_plugin_asked_for(plant: Plant) -> None:
    import httpx2

    install(plant)
    config = EngineConfig(cache={"num_blocks": 4096})
    async with on_loopback(lambda ids, sampling: 65, settings=NAMED, config=config, latency=0.01) as server:
        async with (
            httpx2.AsyncClient(base_url=server.address, timeout=60) as client,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(lambda: client.post("/own/say/1500", json={"prompt": "x"}))
            await until(lambda: server.engine.request_ids != ())
            tasks.cancel_scope.cancel()
        await until(lambda: server.engine.request_ids == () and len(server.calls) == 0)
        assert server.contexts[0].endpoint_outcomes == {("own", "cut_off"): 1}


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("None", "its factory returned None; it must return a list of EndpointRoute"),
        ("[]", "its factory returned []; it must return a list of EndpointRoute"),
        ("[1]", "it must return a list of EndpointRoute"),
        ("[EndpointRoute(method='PUT', path='/x', handler=say)]", "method 'PUT' of /x is not one of GET, POST, DELETE"),
        ("[EndpointRoute(method='GET', path='x', handler=say)]", "path 'x' is not of the form /name/{placeholder}"),
        ("[EndpointRoute(method='GET', path='/{a:path}', handler=say)]", "is not of the form"),
        ("[EndpointRoute(method='GET', path='/{a}/{a}', handler=say)]", "has two placeholders of one name"),
        ("[EndpointRoute(method='GET', path='/x', handler=None)]", "the handler of GET /x cannot be called"),
        ("[EndpointRoute(method='GET', path='/x', handler=say, raw_body=True)]", "which only a POST may have"),
    ],
    ids=lambda value: value if value.startswith("[") else "",
)
async def test_wrong_routes_are_refused_when_the_server_starts(plant: Plant, bad: str, said: str) -> None:
    install(plant, names=(("own", "bad"),), bad=bad)
    async with open_engine() as (engine, _):
        with pytest.raises(PluginContractError) as caught:
            build_context(engine, api_settings(endpoints=("own",)))
    assert str(caught.value).startswith("endpoint 'own' of alpha 1.0: ")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("path", "owner"),
    [
        ("/v1/models", "the server"),
        ("/v1/models/{other}", "the server"),
        ("/{anything}/models", "the server"),
        ("/openapi.json", "the server"),
        ("/own/{x}", "endpoint 'own'"),
    ],
)
async def test_a_path_has_one_owner(plant: Plant, path: str, owner: str) -> None:
    bad = f"[EndpointRoute(method='DELETE', path={path!r}, handler=say)]"
    install(plant, names=(("own", "make"), ("two", "bad")), bad=bad)
    async with open_engine() as (engine, _):
        context = build_context(engine, api_settings(endpoints=("own", "two")))
        with pytest.raises(
            PluginConflictError, match=rf"endpoint 'two' adds DELETE .* is a path of {owner}; take 'two' out"
        ):
            all_routes(context)


async def test_one_endpoint_may_have_a_fixed_path_beside_a_placeholder(plant: Plant) -> None:
    bad = "[EndpointRoute(method='GET', path=path, handler=shows) for path in ('/two/{x}', '/two/all')]"
    install(plant, names=(("own", "bad"),), bad=bad)
    async with in_process(settings=NAMED) as (client, _):
        assert (await client.get("/two/all")).status_code == (await client.get("/two/x")).status_code == 200


async def test_an_unknown_name_is_told_before_the_engine_starts() -> None:
    async with open_engine() as (engine, _):
        with pytest.raises(UnknownPluginError, match="there is no endpoint plugin 'own'"):
            build_context(engine, api_settings(endpoints=("own",)))


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        ("/a/b", "/a/b", True),
        ("/a/b", "/a/c", False),
        ("/a/{x}", "/a/c", True),
        ("/a/{x}", "/{y}/c", True),
        ("/a/{x}", "/a/c/d", False),
        ("/a/{x}/d", "/a/{y:path}", True),
        ("/b/{x}/d", "/a/{y:path}", False),
    ],
)
def test_overlap(one: str, other: str, both: bool) -> None:
    assert overlap(one, other) is overlap(other, one) is both
