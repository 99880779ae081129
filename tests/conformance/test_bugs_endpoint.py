"""Planted bugs: the kit of endpoints names the promise that a wrong one breaks."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from infer import SamplingParams
from infer.errors import InvalidRequestError
from infer.plugins import EndpointCall, EndpointReply, EndpointRoute, EndpointServer, EndpointSpec
from infer.testing.kits import endpoint
from planted_bugs import PlantBug, failures, plant_bug

__all__ = ["plant_bug"]
EXAMPLE: dict[str, Any] = {
    "calls": [
        {"method": "POST", "path": "/own/say", "data": {"prompt": "a"}, "reply": {"text": "hello", "length": 5}},
        {"method": "POST", "path": "/own/say", "data": {"prompt": "abc"}, "reply": {"text": "hello", "length": 5}},
        {"method": "POST", "path": "/own/say", "data": {"prompt": 1}, "status": 400},
        {"method": "GET", "path": "/own/stream/5?x=1", "events": 1},
        {"method": "GET", "path": "/own/stream/0", "status": 400},
    ]
}


class Good:
    def __init__(self, server: EndpointServer) -> None:
        self.server = server
        self.last = ""

    async def ask(self, call: EndpointCall, prompt: str) -> str:
        params = SamplingParams(max_tokens=600, temperature=0)
        return (await self.server.engine.generate(prompt, params, request_id=call.request_id)).text

    def prompt(self, call: EndpointCall) -> str:
        prompt = call.data.get("prompt")
        if not isinstance(prompt, str):
            raise InvalidRequestError(f"prompt={prompt!r} is not text", parameter="prompt", value=prompt)
        return prompt

    async def say(self, call: EndpointCall) -> EndpointReply | None:
        text = await self.ask(call, self.prompt(call))
        return EndpointReply(data={"text": text, "length": len(text)})

    async def stream(self, call: EndpointCall) -> EndpointReply | None:
        if call.path["n"] == "0":
            return EndpointReply(status=400, data={"error": "n"})
        events = await call.open_events()
        await events.send({"text": await self.ask(call, "x")})
        return None

    def routes(self) -> Sequence[EndpointRoute]:
        return [
            EndpointRoute(method="POST", path="/own/say", handler=self.say),
            EndpointRoute(method="GET", path="/own/stream/{n}", handler=self.stream),
        ]


class TrustsItsInput(Good):
    def prompt(self, call: EndpointCall) -> str:
        return str(call.data["prompt"]) if call.data.get("prompt") != 1 else super().prompt(call)


class RemembersTheLastCall(Good):
    async def say(self, call: EndpointCall) -> EndpointReply | None:
        self.last += self.prompt(call)
        text = await self.ask(call, self.last)
        return EndpointReply(data={"text": text, "length": len(self.last) + 4})


class SharesAPlace(Good):
    async def say(self, call: EndpointCall) -> EndpointReply | None:
        self.last = self.prompt(call)
        mine = self.last
        await self.ask(call, self.last)
        return EndpointReply(data={"text": "hello", "length": 5 if self.last == mine else 0})


class SwallowsErrors(Good):
    async def ask(self, call: EndpointCall, prompt: str) -> str:
        try:
            return await super().ask(call, prompt)
        except Exception:
            return ""


class IgnoresTheClient(Good):
    async def ask(self, call: EndpointCall, prompt: str) -> str:
        with anyio.CancelScope(shield=True):
            return await super().ask(call, prompt)


class FixedRequestId(Good):
    async def ask(self, call: EndpointCall, prompt: str) -> str:
        return (await self.server.engine.generate(prompt, SamplingParams(max_tokens=600), request_id="mine")).text


class ReturnsADict(Good):
    async def say(self, call: EndpointCall) -> EndpointReply | None:
        self.prompt(call)
        return {"text": "hello", "length": 5}  # type: ignore[return-value]


class AnotherRouteEachTime(Good):
    numbers = itertools.count()

    def routes(self) -> Sequence[EndpointRoute]:
        route = EndpointRoute(method="GET", path=f"/own/{next(self.numbers)}", handler=self.stream)
        return [*super().routes(), route]


class TakesAPathOfTheServer(Good):
    def routes(self) -> Sequence[EndpointRoute]:
        return [*super().routes(), EndpointRoute(method="GET", path="/health", handler=self.stream)]


EVERYTHING = {
    *("routes", "answers_its_examples", "refuses_hostile_bodies", "calls_stand_alone", "many_at_once"),
    *("leaves_when_the_client_does", "passes_refusals_on", "survives_a_failed_step"),
}


@pytest.mark.row("X-PLUGIN-KIT", "the kit fails six planted plugin bugs")
@pytest.mark.parametrize(
    ("bug", "broken"),
    [
        (Good, set()),
        (TrustsItsInput, {"refuses_hostile_bodies"}),
        (RemembersTheLastCall, {"answers_its_examples", "calls_stand_alone", "many_at_once"}),
        (SharesAPlace, {"many_at_once"}),
        (SwallowsErrors, {"passes_refusals_on", "survives_a_failed_step"}),
        (IgnoresTheClient, {"leaves_when_the_client_does"}),
        (FixedRequestId, {"many_at_once"}),
        (ReturnsADict, {"answers_its_examples", "calls_stand_alone", "many_at_once", "survives_a_failed_step"}),
        (AnotherRouteEachTime, {"routes"}),
        (TakesAPathOfTheServer, EVERYTHING),
    ],
)
def test_the_kit_names_the_broken_promise(
    plant_bug: PlantBug, monkeypatch: pytest.MonkeyPatch, bug: type[Good], broken: set[str]
) -> None:
    if bug is IgnoresTheClient:  # the answer is long, and the kit would wait for it
        monkeypatch.setattr(endpoint, "SECONDS", 2.0)
    failed = failures(endpoint.checks(spec(plant_bug(lambda server: bug(server).routes()))))
    assert failed >= broken
    assert bool(failed) == bool(broken)


@pytest.mark.parametrize(
    ("calls", "broken"),
    [
        ([], "example"),
        ([{"method": "PUT", "path": "/own/say"}], "example"),
        (EXAMPLE["calls"][:1], "routes"),
        ([{**EXAMPLE["calls"][0], "reply": {"text": "bye"}}, *EXAMPLE["calls"][1:]], "answers_its_examples"),
        ([*EXAMPLE["calls"][:3], {**EXAMPLE["calls"][3], "events": 2}], "answers_its_examples"),
    ],
    ids=["none", "method", "not every route", "another reply", "more events"],
)
def test_the_kit_reads_the_example(plant_bug: PlantBug, calls: list[Any], broken: str) -> None:
    wrong = dataclasses.replace(spec(plant_bug(lambda server: Good(server).routes())), example={"calls": calls})
    checks = [check for check in endpoint.checks(wrong) if check.name.partition("[")[0] == broken]
    assert failures(checks) == {broken}


def test_an_endpoint_works_with_its_defaults(plant_bug: PlantBug) -> None:
    """The example gives an option without which it has no routes."""

    def make(server: EndpointServer) -> Sequence[EndpointRoute]:
        return Good(server).routes() if server.options["on"] else []

    with_options = dataclasses.replace(
        spec(plant_bug(make)), options={"on": False}, example=EXAMPLE | {"options": {"on": True}}
    )
    assert failures(endpoint.checks(with_options)) == {"options"}


def spec(factory: str) -> EndpointSpec:
    return EndpointSpec(name="bug", api=1, factory=factory, example=EXAMPLE)
