"""Chat completions over a scripted engine: replies, chunks, log-probabilities, usage, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from api_server import HELLO, MODEL, events, in_process
from infer.config.model import GenerationDefaults

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"


def ask(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **more}


def chunks(reply: httpx2.Response) -> list[dict[str, Any]]:
    data = events(reply.text)
    assert data[-1] == "[DONE]"
    return [json.loads(event) for event in data[:-1]]


def error(reply: httpx2.Response) -> tuple[int, str | None, str]:
    body = reply.json()["error"]
    return reply.status_code, body["param"], body["message"]


async def test_a_reply() -> None:
    async with in_process() as (client, _):
        reply = await client.post(CHAT, json=ask(), headers={"x-request-id": "mine-7"})
    assert reply.status_code == 200
    body = reply.json()
    assert reply.headers["x-request-id"] == "mine-7"
    assert body["id"] == "chatcmpl-mine-7"
    assert body["object"] == "chat.completion" and body["model"] == MODEL
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": HELLO, "refusal": None}
    assert choice["finish_reason"] == "stop" and choice["logprobs"] is None
    prompt = len("<user>hi\n<assistant>")
    output = len(HELLO.encode()) + 1
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.row("SERVE-OAI-BASIC", "joined stream text equals the non-streamed text")
async def test_a_stream_has_a_role_frame_deltas_one_finish_reason_and_the_end_mark() -> None:
    async with in_process() as (client, _):
        reply = await client.post(CHAT, json=ask(stream=True))
    assert reply.headers["content-type"].startswith("text/event-stream")
    got = chunks(reply)
    deltas = [chunk["choices"][0] for chunk in got]
    assert deltas[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(choice["delta"].get("content", "") for choice in deltas) == HELLO
    assert [choice["finish_reason"] for choice in deltas if choice["finish_reason"]] == ["stop"]
    assert deltas[-1]["finish_reason"] == "stop"
    assert len({chunk["id"] for chunk in got}) == 1
    assert not any("usage" in chunk for chunk in got)


async def test_several_choices_stream_side_by_side() -> None:
    async with in_process() as (client, _):
        got = chunks(await client.post(CHAT, json=ask(stream=True, n=3)))
    texts = {0: "", 1: "", 2: ""}
    ends: list[int] = []
    for chunk in got:
        [choice] = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        if choice["finish_reason"]:
            ends.append(choice["index"])
    assert texts == dict.fromkeys(range(3), HELLO)
    assert sorted(ends) == [0, 1, 2]


@pytest.mark.row("SERVE-STREAM-USAGE", "with include_usage the last chunk's counts equal the ids counted")
async def test_include_usage_sends_a_last_chunk_without_choices() -> None:
    async with in_process() as (client, _):
        whole = (await client.post(CHAT, json=ask())).json()["usage"]
        got = chunks(await client.post(CHAT, json=ask(stream=True, stream_options={"include_usage": True})))
    assert got[-1]["choices"] == [] and got[-1]["usage"] == {
        **whole,
        "prompt_tokens_details": got[-1]["usage"]["prompt_tokens_details"],
    }
    assert all(chunk["usage"] is None for chunk in got[:-1])


@pytest.mark.row("SERVE-STREAM-USAGE", "continuous usage is monotonic, and needs include_usage")
async def test_continuous_usage() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with in_process() as (client, _):
        got = chunks(await client.post(CHAT, json=ask(stream=True, stream_options=options)))
        without = chunks(
            await client.post(CHAT, json=ask(stream=True, stream_options={"continuous_usage_stats": True}))
        )
    counts = [chunk["usage"]["completion_tokens"] for chunk in got]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == len(HELLO.encode()) + 1
    assert not any("usage" in chunk for chunk in without)


@pytest.mark.row("SERVE-STREAM-USAGE", "a server-wide setting forces usage on every stream")
async def test_forced_usage() -> None:
    async with in_process(settings={"force_include_usage": True}) as (client, _):
        got = chunks(await client.post(CHAT, json=ask(stream=True)))
    assert got[-1]["choices"] == [] and got[-1]["usage"]["completion_tokens"] > 0


@pytest.mark.row("SERVE-STREAM-USAGE", "cached-token detail equals the cache's own count")
async def test_cached_tokens_are_told() -> None:
    messages = [{"role": "user", "content": "x" * 100}]
    async with in_process() as (client, server):
        for expected_hit in (False, True):
            before = server.engine.statistics().prefix_hit_tokens
            usage = (await client.post(CHAT, json=ask(messages=messages))).json()["usage"]
            counted = server.engine.statistics().prefix_hit_tokens - before
            assert usage["prompt_tokens_details"]["cached_tokens"] == counted
            assert (counted > 0) is expected_hit


async def test_stream_options_without_a_stream_are_refused() -> None:
    async with in_process() as (client, _):
        reply = await client.post(CHAT, json=ask(stream_options={"include_usage": True}))
        misspelt = await client.post(CHAT, json=ask(stream=True, stream_options={"includ_usage": True}))
    assert error(reply)[:2] == (400, "stream_options")
    assert error(misspelt)[:2] == (400, "stream_options.includ_usage")


async def test_logprobs_with_alternatives_whole_and_streamed() -> None:
    async with in_process() as (client, _):
        whole = (await client.post(CHAT, json=ask(logprobs=True))).json()["choices"][0]["logprobs"]["content"]
        got = chunks(await client.post(CHAT, json=ask(logprobs=True, stream=True)))
    joined: list[dict[str, Any]] = []
    for chunk in got:
        joined += (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    assert joined == whole
    assert whole[0] == {"token": "H", "logprob": -1.0, "bytes": [72], "top_logprobs": []}
    part = whole[HELLO.encode().index("ö".encode())]  # half a character: its bytes are not known
    assert part["token"] == "\ufffd" and part["bytes"] is None


async def test_top_logprobs_need_logprobs_and_have_a_bound() -> None:
    async with in_process() as (client, _):
        alone = await client.post(CHAT, json=ask(top_logprobs=2))
        many = await client.post(CHAT, json=ask(logprobs=True, top_logprobs=21))
        after = await client.post(CHAT, json=ask())
    assert error(alone)[:2] == (400, "top_logprobs")
    assert error(many)[:2] == (400, "top_logprobs")
    assert after.status_code == 200


async def test_token_ids_and_prompt_logprobs() -> None:
    prompt = list(b"<user>hi\n<assistant>")
    body = ask(return_token_ids=True, prompt_logprobs=0, return_tokens_as_token_ids=True, logprobs=True)
    async with in_process() as (client, _):
        whole = (await client.post(CHAT, json=body)).json()
        got = chunks(await client.post(CHAT, json={**body, "stream": True}))
    ids = whole["choices"][0]["token_ids"]
    assert bytes(ids[:-1]).decode() == HELLO and ids[-1] == 257
    assert whole["prompt_token_ids"] == prompt
    assert whole["choices"][0]["logprobs"]["content"][0]["token"] == "token_id:72"
    entries = whole["prompt_logprobs"]
    assert len(entries) == len(prompt) and entries[0] is None
    assert entries[1] == {"117": {"logprob": -1.0, "rank": 1, "decoded_token": "u"}}
    assert [i for chunk in got for i in chunk["choices"][0].get("token_ids", [])] == ids
    assert got[0]["prompt_token_ids"] == prompt
    assert [chunk["prompt_logprobs"] for chunk in got if "prompt_logprobs" in chunk] == [entries]


async def test_max_completion_tokens_and_max_tokens() -> None:
    async with in_process() as (client, _):
        for field in ("max_tokens", "max_completion_tokens"):
            choice = (await client.post(CHAT, json=ask(**{field: 4}))).json()["choices"][0]
            assert (choice["message"]["content"], choice["finish_reason"]) == (HELLO[:4], "length")
        assert (await client.post(CHAT, json=ask(max_tokens=4, max_completion_tokens=4))).status_code == 200
        differ = await client.post(CHAT, json=ask(max_tokens=4, max_completion_tokens=5))
    assert error(differ)[:2] == (400, "max_completion_tokens")


async def test_a_stop_string_cuts_and_is_named() -> None:
    async with in_process() as (client, _):
        choice = (await client.post(CHAT, json=ask(stop=["wör", "zz"]))).json()["choices"][0]
        kept = (await client.post(CHAT, json=ask(stop="wör", include_stop_str_in_output=True))).json()["choices"][0]
        got = chunks(await client.post(CHAT, json=ask(stop="wör", stream=True)))
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("Hello, ", "stop", "wör")
    assert kept["message"]["content"] == "Hello, wör"
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in got) == "Hello, "


async def test_a_last_message_of_the_assistants_is_continued() -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "Say Hel"}]
    async with in_process() as (client, _):
        for more, ending in (
            ({}, b"Say Hel"),
            ({"add_generation_prompt": True, "continue_final_message": False}, b"Say Hel\n<assistant>"),
        ):
            reply = await client.post(CHAT, json=ask(messages=messages, return_token_ids=True, **more))
            assert bytes(reply.json()["prompt_token_ids"]).endswith(ending)
        both = await client.post(CHAT, json=ask(add_generation_prompt=True, continue_final_message=True))
    assert error(both)[:2] == (400, "continue_final_message")


async def test_truncation_keeps_one_end_of_the_prompt() -> None:
    whole = b"<user>hi\n<assistant>"
    async with in_process() as (client, _):
        for side, kept in (("left", whole[-4:]), ("right", whole[:4])):
            body = ask(truncate_prompt_tokens=4, truncation_side=side, return_token_ids=True)
            assert bytes((await client.post(CHAT, json=body)).json()["prompt_token_ids"]) == kept


async def test_developer_is_system_where_the_template_knows_no_developer() -> None:
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "q"}]
    async with in_process() as (client, _):
        reply = await client.post(CHAT, json=ask(messages=messages, return_token_ids=True))
    assert bytes(reply.json()["prompt_token_ids"]).startswith(b"<system>be brief")
    assert "developer" in reply.headers["x-infer-notice"]


async def test_generation_defaults_apply_where_the_client_is_silent_or_says_null() -> None:
    defaults = GenerationDefaults(values={"temperature": 0.25, "top_k": 7})
    async with in_process(generation=defaults) as (client, server):
        await client.post(CHAT, json=ask(temperature=None, top_k=-1))
    sampling = server.worker.plans[0].admissions[0].sampling
    assert (sampling.temperature, sampling.top_k) == (0.25, 0)


async def test_priority_salt_seed_and_bias_reach_the_engine() -> None:
    async with in_process() as (client, server):
        reply = await client.post(
            CHAT, json=ask(seed=5, logit_bias={"72": -3}, min_tokens=2, priority=-1, cache_salt="s", max_tokens=3)
        )
        assert reply.status_code == 200
        assert (await client.post(CHAT, json=ask(cache_salt=""))).status_code == 400
    sampling = server.worker.plans[0].admissions[0].sampling
    assert (sampling.seed, sampling.logit_bias, sampling.min_tokens) == (5, ((72, -3.0),), 2)


@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 1e9}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": 1.5}, "n"),
        ({"seed": 2**70}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"max_completion_tokens": "4"}, "max_completion_tokens"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"9999": 1}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"stop": ""}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"deadline": -1}, "deadline"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
)
async def test_wrong_values_name_their_field(body: dict[str, Any], parameter: str) -> None:
    async with in_process() as (client, _):
        reply = await client.post(CHAT, json=ask(**body))
    status, param, message = error(reply)
    assert (status, param) == (400, parameter), message
    assert reply.json()["error"]["type"] == "invalid_request_error"


async def test_a_prompt_too_long_for_the_context_has_its_own_code() -> None:
    async with in_process() as (client, _):
        reply = await client.post(CHAT, json=ask(messages=[{"role": "user", "content": "x" * 3000}]))
    assert reply.status_code == 400
    assert (reply.json()["error"]["code"], reply.json()["error"]["param"]) == ("context_length_exceeded", "messages")


async def test_an_unknown_model_is_404_and_an_alias_is_echoed() -> None:
    async with in_process() as (client, _):
        unknown = await client.post(CHAT, json=ask(model="gpt-5"))
        alias = await client.post(CHAT, json=ask(model="alias"))
        silent = await client.post(CHAT, json=ask(model=None))
    assert unknown.status_code == 404 and unknown.json()["error"]["code"] == "model_not_found"
    assert alias.json()["model"] == "alias" and silent.json()["model"] == MODEL


async def test_a_deadline_ends_with_what_there_is() -> None:
    async with in_process(latency=0.05) as (client, _):
        body = (await client.post(CHAT, json=ask(deadline=0.3))).json()
        limited = body["choices"][0]
    assert (limited["finish_reason"], limited["stop_reason"]) == ("length", "deadline")
    assert HELLO.startswith(limited["message"]["content"].rstrip("\ufffd"))
