"""What trainers ask of each token, over HTTP: scored ids, kept sets, forced ids, on every route that has them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from api_server import MODEL, events, in_process
from infer.api.fields import Body
from infer.api.generate import SAMPLING
from infer.api.openai.schemas import CHAT, COMPLETION
from infer.api.sglang_schemas import GENERATE as SGLANG
from infer.testing.fake_engine import scripted

pytestmark = pytest.mark.anyio
PROMPT = [10, 11, 12]
IDS = [65, 66, 67]  # A, B, C
ROUTES = ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate"]


def body_for(route: str, **sampling: Any) -> dict[str, Any]:
    if route == "/v1/completions":
        return {"model": MODEL, "prompt": PROMPT, "return_token_ids": True, **sampling}
    if route == "/v1/chat/completions":
        return {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "return_token_ids": True, **sampling}
    return {"token_ids": PROMPT, "sampling_params": sampling}


@pytest.mark.parametrize("route", ROUTES)
async def test_forced_ids_come_verbatim_with_their_values(route: str) -> None:
    """As many as there are, whatever the route's default of max_tokens."""
    forced = list(range(65, 85))
    async with in_process(scripted("never")) as (client, _):
        reply = await client.post(route, json=body_for(route, forced_token_ids=forced))
        assert reply.status_code == 200, reply.text
        more = await client.post(route, json=body_for(route, forced_token_ids=[65], max_tokens=3, ignore_eos=True))
        less = await client.post(route, json=body_for(route, forced_token_ids=forced, max_tokens=3))
    [choice] = reply.json()["choices"]
    assert choice["token_ids"] == forced and choice["finish_reason"] == "length"
    entries = choice["logprobs"]
    values = entries["token_logprobs"] if "token_logprobs" in entries else [e["logprob"] for e in entries["content"]]
    assert values == [-1.0] * 20
    assert more.json()["choices"][0]["token_ids"] == [65, *b"ne"], "then it is sampled as at any other place"
    assert less.status_code == 400 and less.json()["error"]["param"].endswith("forced_token_ids")


def scored_by(route: str, choice: dict[str, Any]) -> list[dict[str, float]]:
    """Per position: id -> value, of what stands among the alternatives."""
    entries = choice["logprobs"]
    if route == "/v1/completions":
        return [{key.removeprefix("token_id:"): v for key, v in top.items()} for top in entries["top_logprobs"]]
    name = "token" if route == "/v1/chat/completions" else "token_id"
    return [
        {str(one[name]).removeprefix("token_id:"): one["logprob"] for one in entry["top_logprobs"]}
        for entry in entries["content"]
    ]


@pytest.mark.row("SAMPLE-LOGPROB-TOKEN-IDS", "over HTTP the scored ids stand among the alternatives, as in vLLM")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ROUTES)
async def test_scored_ids_stand_among_the_alternatives(route: str, stream: bool) -> None:
    body = body_for(route, logprob_token_ids=IDS, max_tokens=3)
    if route != "/inference/v1/generate":
        body["return_tokens_as_token_ids"] = True
    async with in_process(scripted("wxy")) as (client, _):
        reply = await client.post(route, json=body | {"stream": stream})
    assert reply.status_code == 200, reply.text
    told: list[dict[str, float]] = []
    replies = [json.loads(e) for e in events(reply.text)[:-1]] if stream else [reply.json()]
    for piece in replies:
        for choice in piece["choices"]:
            told += scored_by(route, choice) if choice["logprobs"] else []
    assert len(told) == 3
    for position in told:
        assert {str(i): position[str(i)] for i in IDS} == {"65": -2.0, "66": -3.0, "67": -4.0}


@pytest.mark.parametrize("route", ROUTES)
async def test_kept_sets(route: str) -> None:
    async with in_process(scripted("wx")) as (client, _):
        reply = await client.post(route, json=body_for(route, return_kept_set=True, top_k=5, max_tokens=2))
    assert reply.status_code == 200, reply.text
    entries = reply.json()["choices"][0]["logprobs"]
    if route == "/v1/completions":
        found = list(zip(entries["kept_ids"], entries["kept_logmass"], strict=True))
    else:
        found = [(entry["kept_ids"], entry["kept_logmass"]) for entry in entries["content"]]
    assert found == [([119], -0.5), ([120], -0.5)]


@pytest.mark.parametrize("route", ROUTES)
async def test_nothing_is_told_that_nobody_asked_for(route: str) -> None:
    async with in_process(scripted("wx")) as (client, _):
        reply = await client.post(route, json=body_for(route, max_tokens=2))
    assert reply.json()["choices"][0]["logprobs"] is None and "kept" not in reply.text


@pytest.mark.parametrize(
    ("sampling", "parameter", "says"),
    [
        ({"logprob_token_ids": list(range(129))}, "logprob_token_ids", "api.max_logprob_token_ids=128"),
        ({"return_kept_set": True, "top_p": 0.9}, "top_k", "api.max_kept_ids"),
        ({"return_kept_set": True, "top_k": 2000}, "top_k", "api.max_kept_ids"),
        ({"forced_token_ids": []}, "forced_token_ids", "empty"),
        ({"forced_token_ids": [1], "n": 2}, "forced_token_ids", "n must be 1"),
        ({"logprob_token_ids": [9999]}, "logprob_token_ids", "vocabulary"),
        ({"logprob_token_ids": "abc"}, "logprob_token_ids", "tuple"),
    ],
)
@pytest.mark.parametrize("route", ROUTES)
async def test_what_has_no_bound_is_refused(route: str, sampling: dict[str, Any], parameter: str, says: str) -> None:
    async with in_process() as (client, _):
        reply = await client.post(route, json=body_for(route, **sampling))
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"].removeprefix("sampling_params.") == parameter and says in error["message"]


async def test_a_greedy_kept_set_needs_no_bound() -> None:
    async with in_process(scripted("wx")) as (client, _):
        body = body_for(ROUTES[2], return_kept_set=True, temperature=0, max_tokens=2)
        assert (await client.post(ROUTES[2], json=body)).status_code == 200


@pytest.mark.row("SAMPLE-LOGPROB-TOKEN-IDS", "SGLang's token_ids_logprob, for output and prompt")
@pytest.mark.parametrize("stream", [False, True])
async def test_sglang_token_ids_logprob(stream: bool) -> None:
    asked = {"return_logprob": True, "logprob_start_len": 1, "token_ids_logprob": [65, 66], "stream": stream}
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}, **asked}
    async with in_process(scripted("wx")) as (client, _):
        reply = await client.post("/generate", json=body)
    assert reply.status_code == 200, reply.text
    last = json.loads(events(reply.text)[-2]) if stream else reply.json()
    meta = last["meta_info"]
    row = [[-2.0, 65, None], [-3.0, 66, None]]
    assert meta["output_token_ids_logprobs"] == [row, row]
    assert meta["input_token_ids_logprobs"] == [None, row]


async def test_sglang_one_list_of_ids_for_each_prompt() -> None:
    body = {
        "input_ids": [PROMPT, PROMPT], "sampling_params": {"max_new_tokens": 1}, "return_logprob": True,
        "token_ids_logprob": [[65], [66, 67]],
    }  # fmt: skip
    async with in_process(scripted("wx")) as (client, _):
        replies = (await client.post("/generate", json=body)).json()
        short = await client.post("/generate", json=body | {"token_ids_logprob": [[65]]})
        silent = (await client.post("/generate", json=body | {"return_logprob": False})).json()
    assert replies[0]["meta_info"]["output_token_ids_logprobs"] == [[[-2.0, 65, None]]]
    assert replies[1]["meta_info"]["output_token_ids_logprobs"] == [[[-2.0, 66, None], [-3.0, 67, None]]]
    assert short.status_code == 400 and short.json()["error"]["param"] == "token_ids_logprob"
    assert all("output_token_ids_logprobs" not in one["meta_info"] for one in silent)


@pytest.mark.parametrize("body", [CHAT, COMPLETION, SAMPLING], ids=["chat", "completions", "generate"])
def test_the_fields_are_documented(body: Body) -> None:
    told = {rule.name: rule for rule in body.rules()}
    for name in ("logprob_token_ids", "return_kept_set", "forced_token_ids", "logprobs_mode"):
        assert told[name].treatment == "honoured" and told[name].note
    assert {rule.name: rule.treatment for rule in SGLANG.rules()}["token_ids_logprob"] == "honoured"
