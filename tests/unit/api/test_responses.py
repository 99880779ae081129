"""`/v1/responses` over a scripted engine: items and events whole and streamed, conversations, refusals, cancel, hostile input."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import anyio
import httpx2
import pytest

from api_server import HELLO, events, in_process, on_loopback, until
from infer import EngineConfig
from infer.engine.step import SamplingSpec
from infer.testing.fake_engine import scripted
from unit.api.test_tools import DIALECTS, HERMES, HERMES_CALL, OSLO, SCHEMAS, WEATHER, template

pytestmark = pytest.mark.anyio
ROW = "SERVE-RESPONSES-MESSAGES"
RESPONSES, CHAT = "/v1/responses", "/v1/chat/completions"
QWEN = template("<tool_call></think><think>")
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "get_weather", "description": "Tomorrow's", "parameters": WEATHER},
    {"type": "function", "name": "get_time"},
]
CHAT_TOOLS = [
    {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}} for tool in TOOLS
]
ANSWER = f"<think>\nHm.\n</think>\n\nI look.\n{HERMES_CALL % ('get_weather', OSLO)}\n{HERMES_CALL % ('get_time', '{}')}"


def server(
    answer: Any = HELLO, source: str | None = None, config: dict[str, Any] | None = None, **settings: Any
) -> Any:
    model = {} if source is None else {"chat_template": source}
    made = EngineConfig(model=model, cache={"num_blocks": 4096}, api=settings, **(config or {}))
    return in_process(scripted(answer) if isinstance(answer, str) else answer, config=made, settings=settings)


def read_events(text: str) -> list[dict[str, Any]]:
    """Numbered from 0, each under its own name, the last one final, and no end marker."""
    names = [line.removeprefix("event: ") for line in text.split("\n") if line.startswith("event: ")]
    told = [json.loads(data) for data in events(text)]
    assert [event["type"] for event in told] == names
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    return told


def plain(response: dict[str, Any]) -> dict[str, Any]:
    """Without what differs between two responses to one request."""
    text = json.dumps({**response, "id": "", "created_at": 0, "completed_at": 0})
    same = dict(json.loads(text.replace(response["id"].removeprefix("resp_"), "")))
    for item in same["output"]:
        item.pop("call_id", None)  # Mistral's are hashes
    return same


def rebuilt(told: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output that the events describe; fails on any that contradicts those before it."""
    output: list[dict[str, Any]] = []
    for event in told:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(output) and event["item"]["status"] == "in_progress"
            assert not event["item"].get("content") and not event["item"].get("arguments")
            assert all(item["status"] != "in_progress" for item in output), "one item after the other"
            output.append(event["item"])
            continue
        if "output_index" not in event:
            continue
        item = output[event["output_index"]]
        assert item is output[-1] and item["status"] == "in_progress"
        if kind == "output_item.done":
            assert event["item"] == {**item, "status": event["item"]["status"]}
            output[-1] = event["item"]
            continue
        assert event["item_id"] == item["id"]
        if kind == "content_part.added":
            assert event["content_index"] == len(item["content"]) and event["part"]["text"] == ""
            item["content"].append(event["part"])
        elif kind.endswith("arguments.delta"):
            item["arguments"] += event["delta"]
        elif kind.endswith("arguments.done"):
            assert (event["arguments"], event["name"]) == (item["arguments"], item["name"])
        else:
            part = item["content"][event["content_index"]]
            if kind == "content_part.done":
                assert event["part"] == part
            elif kind.endswith(".delta"):
                part["text"] += event["delta"]
                part["logprobs"] = part.get("logprobs", []) + event["logprobs"] if "logprobs" in event else None
                if part["logprobs"] is None:
                    del part["logprobs"]
            else:
                assert kind in ("output_text.done", "reasoning_text.done") and event["text"] == part["text"]
                assert event.get("logprobs") == part.get("logprobs")
    return output


async def both(client: httpx2.AsyncClient, body: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(response, events): the same whole and streamed, and stored as it was sent."""
    body = {"seed": 1, **body}
    reply = await client.post(RESPONSES, json=body)
    assert reply.status_code == 200, reply.text
    whole = reply.json()
    told = read_events((await client.post(RESPONSES, json={**body, "stream": True})).text)
    final = told[-1]["response"]
    cached = [one["usage"].pop("input_tokens_details") for one in (whole, final)]
    assert plain(final) == plain(whole)
    for one, details in zip((whole, final), cached, strict=True):
        one["usage"]["input_tokens_details"] = details
        if one["store"]:
            assert (await client.get(f"{RESPONSES}/{one['id']}")).json() == one
    assert rebuilt(told) == final["output"]
    assert [event["type"] for event in told[:2]] == ["response.created", "response.in_progress"]
    assert told[-1]["type"] == f"response.{final['status']}"
    assert all(event["response"]["status"] == "in_progress" for event in told[:2])
    return whole, told


def kinds(response: dict[str, Any]) -> list[str]:
    return [item["type"] for item in response["output"]]


def text_of(response: dict[str, Any]) -> str:
    messages = [item for item in response["output"] if item["type"] == "message"]
    return "".join(part["text"] for item in messages for part in item["content"])


# -- answers -----------------------------------------------------------------------------------------------------------


async def test_plain_text_in_and_out() -> None:
    async with server() as (client, _):
        whole, told = await both(client, {"input": "hi", "metadata": {"of": "mine"}, "temperature": 0.5})
        chat = (await client.post(CHAT, json={"messages": [{"role": "user", "content": "hi"}]})).json()
    assert whole["id"].startswith("resp_") and whole["object"] == "response" and whole["status"] == "completed"
    [message] = whole["output"]
    assert message["content"] == [{"type": "output_text", "text": HELLO, "annotations": [], "logprobs": []}]
    assert (message["role"], message["status"]) == ("assistant", "completed")
    assert whole["metadata"] == {"of": "mine"} and whole["temperature"] == 0.5 and whole["store"] is True
    assert whole["error"] is whole["incomplete_details"] is whole["previous_response_id"] is None
    assert whole["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    order = [event["type"].removeprefix("response.") for event in told if not event["type"].endswith(".delta")]
    assert order == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]


@pytest.mark.row(
    ROW, "reasoning, text and calls are items in their order, whole and streamed, with counts equal to chat"
)
@pytest.mark.parametrize("dialect", [*DIALECTS, "qwen3"])
async def test_reasoning_text_and_calls(dialect: str) -> None:
    source, answer, content, reasoning = DIALECTS.get(dialect, (QWEN, ANSWER, "\n\nI look.\n", "\nHm.\n"))
    messages = [{"role": "user", "content": "hi"}]
    async with server(answer, source) as (client, _):
        whole, told = await both(client, {"input": "hi", "tools": TOOLS})
        chat = (await client.post(CHAT, json={"messages": messages, "tools": CHAT_TOOLS})).json()
    message, usage = chat["choices"][0]["message"], chat["usage"]
    calls = [(item["name"], item["arguments"]) for item in whole["output"] if item["type"] == "function_call"]
    assert calls == [("get_weather", OSLO), ("get_time", "{}")]
    assert calls == [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    assert (text_of(whole) or None) == message["content"] == content
    thought = [item["content"][0]["text"] for item in whole["output"] if item["type"] == "reasoning"]
    assert "".join(thought) == (message.get("reasoning") or "")
    assert kinds(whole) == ["reasoning"] * bool(reasoning) + ["message"] * bool(content) + ["function_call"] * 2
    assert len({item["id"] for item in whole["output"]}) == len(whole["output"])
    assert len({item["call_id"] for item in whole["output"] if item["type"] == "function_call"}) == 2
    counts = whole["usage"]
    details = usage.get("completion_tokens_details", {"reasoning_tokens": 0})
    assert counts["output_tokens_details"] == details and bool(details["reasoning_tokens"]) is bool(reasoning)
    assert (counts["input_tokens"], counts["output_tokens"], counts["total_tokens"]) == (
        usage["prompt_tokens"],
        usage["completion_tokens"],
        usage["total_tokens"],
    )
    last = told[-1]["response"]["usage"]["input_tokens_details"]
    assert last == usage["prompt_tokens_details"] and last["cached_tokens"] > 0


async def test_a_response_that_is_cut_off() -> None:
    cut = ANSWER[: ANSWER.index("Oslo")]
    async with server(ANSWER, QWEN) as (client, _):
        in_call, _ = await both(client, {"input": "hi", "tools": TOOLS, "max_output_tokens": len(cut)})
        thinking, _ = await both(client, {"input": "hi", "max_output_tokens": 10})
        late, _ = await both(client, {"input": "hi", "deadline": 1e-6})
    for one in (in_call, thinking, late):
        assert one["status"] == "incomplete" and one["incomplete_details"] == {"reason": "max_output_tokens"}
        assert one["completed_at"] is None
    assert [item["status"] for item in in_call["output"]] == ["completed", "completed", "incomplete"]
    assert in_call["output"][-1]["name"] == "get_weather"
    assert [(item["type"], item["status"]) for item in thinking["output"]] == [("reasoning", "incomplete")]
    assert late["stop_reason"] == "deadline"


async def test_an_empty_answer_and_white_space_around_calls() -> None:
    async with server("", HERMES) as (client, _):
        empty, _ = await both(client, {"input": "hi"})
    async with server(f"\n\n{HERMES_CALL % ('get_time', '{}')}\n \n", HERMES) as (client, _):
        called, _ = await both(client, {"input": "hi", "tools": TOOLS})
    async with server(" \n hi ", HERMES) as (client, _):
        spaced, _ = await both(client, {"input": "hi", "tools": TOOLS})
    assert kinds(empty) == ["message"] and text_of(empty) == ""
    assert kinds(called) == ["function_call"]
    assert text_of(spaced) == " \n hi "


async def test_log_probabilities_are_those_of_the_text() -> None:
    include = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    async with server(ANSWER.replace("I look.", "Ich schaue grün."), QWEN) as (client, _):
        whole, _ = await both(client, {"input": "hi", "tools": TOOLS, **include})
        stopped, _ = await both(client, {"input": "hi", "stop": ["schaue"], "top_logprobs": 1})
        none, _ = await both(client, {"input": "hi"})
        too_many = await client.post(RESPONSES, json={"input": "hi", "top_logprobs": 21})
        chat = await client.post(
            CHAT,
            json={
                "messages": [{"role": "user", "content": "hi"}],
                "tools": CHAT_TOOLS,
                "seed": 1,
                "logprobs": True,
                "top_logprobs": 2,
            },
        )
    part = whole["output"][1]["content"][0]
    tokens = part["logprobs"]
    assert bytes(b for one in tokens for b in one["bytes"] or ()) == b"".join(
        char.encode() for char in part["text"] if char.isascii()
    )
    assert len(tokens) == len(part["text"].encode()), "one token is one byte here"
    everything = chat.json()["choices"][0]["logprobs"]["content"]
    start = ANSWER.index("\n\nI look.")
    assert tokens == everything[start : start + len(tokens)]
    [part] = stopped["output"][-1]["content"]
    assert (part["text"], "".join(one["token"] for one in part["logprobs"])) == ("\n\nIch ", "\n\nIch ")
    assert none["output"][-1]["content"][0]["logprobs"] == []
    assert too_many.status_code == 400 and too_many.json()["error"]["param"] == "top_logprobs"


async def test_forms_and_choices() -> None:
    form = {"type": "json_schema", "name": "day", "schema": SCHEMAS["get_weather"], "strict": True}
    async with server(lambda ids, sampling: 32 + (len(ids) * 7 + sampling.seed) % 90, HERMES) as (client, _):
        shaped, _ = await both(client, {"input": "hi", "text": {"format": form}, "seed": 3})
        some, _ = await both(
            client, {"input": "hi", "text": {"format": {"type": "json_object"}}, "max_output_tokens": 60}
        )
        for choice in (
            "required",
            {"type": "function", "name": "get_weather"},
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]},
        ):
            asked = {"input": "hi", "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "seed": 5}
            called, _ = await both(client, {**asked, "max_output_tokens": 400})
            assert kinds(called) == ["function_call"] and called["tool_choice"] == choice
            assert choice == "required" or called["output"][0]["name"] == "get_weather"
        none, _ = await both(
            client, {"input": "hi", "tools": TOOLS, "tool_choice": "none", "max_output_tokens": 5, "seed": 1}
        )
    assert set(json.loads(text_of(shaped))) == {"city", "days"} and shaped["text"]["format"] == form
    assert text_of(some).lstrip().startswith("{")
    assert kinds(none) == ["message"]
    assert called["tools"][1] == {"type": "function", "name": "get_time", "strict": False}


# -- conversations -----------------------------------------------------------------------------------------------------


class Prompts:
    """Remembers what the model was shown."""

    def __init__(self, answer: str = "Ja.") -> None:
        self.seen: list[str] = []
        self._answer = scripted(answer)

    def __call__(self, token_ids: Sequence[int], sampling: SamplingSpec) -> int:
        text = bytes(i for i in token_ids if i < 256).decode("utf-8", "replace")
        if text.endswith("<assistant>"):
            self.seen.append(text)
        return self._answer(token_ids, sampling)


@pytest.mark.row(ROW, "a previous response is gone on from: the prompt is that of the whole conversation")
async def test_going_on_from_a_previous_response() -> None:
    model = Prompts()
    async with server(model, HERMES) as (client, _):
        first = (await client.post(RESPONSES, json={"input": "One?", "instructions": "Be brief."})).json()
        second = {"input": "Two?", "previous_response_id": first["id"], "instructions": "Be kind."}
        again = (await client.post(RESPONSES, json=second)).json()
        third = {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Three?"}]}], "store": False}
        last = (await client.post(RESPONSES, json={**third, "previous_response_id": again["id"]})).json()
        sent = [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "One?"},
            *first["output"],
            {"type": "message", "role": "user", "content": "Two?"},
        ]
        whole = (await client.post(RESPONSES, json={"input": sent})).json()
        forked = (await client.post(RESPONSES, json=second)).json()
        listed = (await client.get(f"{RESPONSES}/{again['id']}/input_items")).json()
        unstored = await client.get(f"{RESPONSES}/{last['id']}")
    assert model.seen[0] == "<system>Be brief.<user>One?<assistant>"
    assert model.seen[1] == "<system>Be kind.<user>One?<assistant>Ja.<user>Two?<assistant>"
    assert model.seen[2] == "<user>One?<assistant>Ja.<user>Two?<assistant>Ja.<user>Three?<assistant>"
    assert model.seen[3] == model.seen[1] == model.seen[4]
    assert again["previous_response_id"] == first["id"] and forked["id"] != again["id"]
    assert whole["usage"]["input_tokens"] == again["usage"]["input_tokens"]
    assert [item["content"][0]["text"] for item in listed["data"]] == ["Two?"]
    assert last["store"] is False and unstored.status_code == 404


@pytest.mark.row(ROW, "a tool round trip with reasoning, sent back or gone on from, shows the model the same")
async def test_a_tool_round_trip() -> None:
    model = Prompts(ANSWER)
    source = QWEN.replace(
        "{{ m.content }}", "{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}{{ m.content }}"
    )
    async with server(model, source) as (client, _):
        first = (await client.post(RESPONSES, json={"input": "hi", "tools": TOOLS})).json()
        calls = [item for item in first["output"] if item["type"] == "function_call"]
        results: list[dict[str, Any]] = [
            {"type": "function_call_output", "call_id": call["call_id"], "output": f"result {index}"}
            for index, call in enumerate(calls)
        ]
        results[1]["output"] = [{"type": "input_text", "text": "result 1"}]
        going_on = {"input": results, "previous_response_id": first["id"], "tools": TOOLS}
        on = await client.post(RESPONSES, json=going_on)
        back = await client.post(
            RESPONSES, json={"input": [{"role": "user", "content": "hi"}, *first["output"], *results], "tools": TOOLS}
        )
        orphan = await client.post(RESPONSES, json={"input": [{**results[0], "call_id": "nobody"}]})
    assert on.status_code == back.status_code == 200, (on.text, back.text)
    assert model.seen[1] == model.seen[2]
    assert "<assistant>[\nHm.\n]\n\nI look.\n[{" in model.seen[1] and calls[0]["call_id"] in model.seen[1]
    assert model.seen[1].endswith("<tool>result 0<tool>result 1<assistant>")
    assert orphan.status_code == 400 and "nobody" in orphan.json()["error"]["message"]


async def test_what_is_not_there_any_more() -> None:
    async with server(responses_max_count=2) as (client, _):
        ids = [(await client.post(RESPONSES, json={"input": "hi"})).json()["id"] for _ in range(2)]
        chained = (await client.post(RESPONSES, json={"input": "a", "previous_response_id": ids[0]})).json()["id"]
        assert (await client.get(f"{RESPONSES}/{ids[1]}")).status_code == 404, "the least recently used made room"
        deleted = await client.delete(f"{RESPONSES}/{ids[0]}")
        twice = await client.delete(f"{RESPONSES}/{ids[0]}")
        orphan = await client.post(RESPONSES, json={"input": "b", "previous_response_id": chained})
        unknown = await client.post(RESPONSES, json={"input": "b", "previous_response_id": "resp_x"})
        missing = [
            await client.get(f"{RESPONSES}/resp_x"),
            await client.get(f"{RESPONSES}/resp_x/input_items"),
            await client.post(f"{RESPONSES}/resp_x/cancel"),
        ]
    assert deleted.json() == {"id": ids[0], "object": "response.deleted", "deleted": True}
    for reply in (twice, *missing):
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "response_not_found")
    for reply in (orphan, unknown):
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (400, "previous_response_not_found")
        assert error["param"] == "previous_response_id" and error["type"] == "invalid_request_error"
    assert ids[0] in orphan.json()["error"]["message"] and chained in orphan.json()["error"]["message"]


async def test_a_server_that_keeps_nothing() -> None:
    async with server(responses_max_count=0) as (client, _):
        silent = (await client.post(RESPONSES, json={"input": "hi"})).json()
        asked = await client.post(RESPONSES, json={"input": "hi", "store": True})
        found = await client.get(f"{RESPONSES}/{silent['id']}")
        on = await client.post(RESPONSES, json={"input": "hi", "previous_response_id": silent["id"]})
    assert silent["store"] is False and found.status_code == 404
    assert (asked.status_code, asked.json()["error"]["param"]) == (400, "store")
    assert (on.status_code, on.json()["error"]["code"]) == (400, "previous_response_not_found")


async def test_input_items_in_pages() -> None:
    items = [{"role": "user", "content": str(index), "id": f"item{index}"} for index in range(5)]
    async with server() as (client, _):
        made = (await client.post(RESPONSES, json={"input": items})).json()["id"]
        url = f"{RESPONSES}/{made}/input_items"
        newest = (await client.get(url)).json()
        page = (await client.get(url, params={"order": "asc", "after": "item1", "limit": 2})).json()
        bad = [await client.get(url, params=params) for params in ({"order": "x"}, {"limit": 101}, {"after": "x"})]
    assert [item["id"] for item in newest["data"]] == ["item4", "item3", "item2", "item1", "item0"]
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("item2", "item3", True)
    assert newest["data"][0]["content"] == [{"type": "input_text", "text": "4"}]
    assert [reply.json()["error"]["param"] for reply in bad] == ["order", "limit", "after"]


@pytest.mark.row(ROW, "one key cannot read, continue, cancel or delete another key's response")
async def test_keys_are_kept_apart() -> None:
    mine, other = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
    async with server(api_keys=("one", "two")) as (client, _):
        made = (await client.post(RESPONSES, json={"input": "hi"}, headers=mine)).json()["id"]
        url = f"{RESPONSES}/{made}"
        on = {"input": "hi", "previous_response_id": made}
        refused = [
            await client.get(url, headers=other),
            await client.get(f"{url}/input_items", headers=other),
            await client.post(f"{url}/cancel", headers=other),
            await client.delete(url, headers=other),
            await client.post(RESPONSES, json=on, headers=other),
        ]
        by_another_header = await client.get(url, headers={"x-api-key": "one"})
        went_on = await client.post(RESPONSES, json=on, headers=mine)
    assert [reply.status_code for reply in refused] == [404, 404, 404, 404, 400]
    assert all("not found" in reply.json()["error"]["message"] for reply in refused)
    assert by_another_header.status_code == went_on.status_code == 200


# -- what ends a response early ----------------------------------------------------------------------------------------


def slow(**more: Any) -> Any:
    return on_loopback(scripted("x" * 1500), latency=0.01, **more)


@pytest.mark.row(ROW, "a response that is streamed can be read, cancelled, and is stored as cancelled")
async def test_cancel_ends_a_stream() -> None:
    async with slow() as server, httpx2.AsyncClient(base_url=server.address, timeout=60) as client:
        told: list[dict[str, Any]] = []
        async with client.stream("POST", RESPONSES, json={"input": "hi", "stream": True}) as reply:
            async for line in reply.aiter_lines():
                if not line.startswith("data: "):
                    continue
                told.append(json.loads(line.removeprefix("data: ")))
                if len(told) == 8:
                    url = f"{RESPONSES}/{told[0]['response']['id']}"
                    running = (await client.get(url)).json()
                    busy = await client.delete(url)
                    on = {"input": "a", "previous_response_id": running["id"]}
                    early = await client.post(RESPONSES, json=on)
                    items = (await client.get(f"{url}/input_items")).json()
                    cancelled = (await client.post(f"{url}/cancel")).json()
        stored = (await client.get(url)).json()
        again = (await client.post(f"{url}/cancel")).json()
        whole = (await client.post(RESPONSES, json={"input": "hi", "max_output_tokens": 2})).json()
        over = await client.post(f"{RESPONSES}/{whole['id']}/cancel")
        await until(lambda: not server.engine.statistics().running)
    assert running["status"] == "in_progress" and running["output"][0]["status"] == "in_progress"
    assert busy.status_code == 409 and early.json()["error"]["code"] == "previous_response_in_progress"
    assert [item["content"][0]["text"] for item in items["data"]] == ["hi"]
    assert cancelled["status"] == "cancelled" and stored == cancelled == again == told[-1]["response"]
    assert told[-1]["type"] == "response.incomplete" and rebuilt(told) == stored["output"]
    assert (over.status_code, over.json()["error"]["code"]) == (400, "response_is_over")


async def test_a_client_that_goes_away_leaves_nothing_behind() -> None:
    async with slow() as server, httpx2.AsyncClient(base_url=server.address, timeout=60) as client:
        async with client.stream("POST", RESPONSES, json={"input": "hi", "stream": True}) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: "):
                    made = json.loads(line.removeprefix("data: "))["response"]["id"]
                    break
        await until(lambda: not server.engine.statistics().running and len(server.calls) == 0)
        found = await client.get(f"{RESPONSES}/{made}")
    assert found.status_code == 404


async def test_a_server_that_stops_says_so_in_the_stream() -> None:
    async with slow(settings={"drain_seconds": 0}) as server, httpx2.AsyncClient(base_url=server.address) as client:
        told: list[dict[str, Any]] = []
        async with client.stream("POST", RESPONSES, json={"input": "hi", "stream": True}) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: "):
                    told.append(json.loads(line.removeprefix("data: ")))
                    server.stop.set()
    last = told[-1]
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "server_error"
    assert "shutting down" in last["response"]["error"]["message"]
    assert [event["sequence_number"] for event in told] == list(range(len(told)))


async def test_a_failed_step_fails_the_response() -> None:
    async with in_process(scripted("x" * 500)) as (client, server):

        def fault(plan: Any) -> Exception | None:
            return RuntimeError("a planted fault") if len(server.worker.plans) % 20 == 19 else None

        server.worker.fail_at = fault
        told = read_events((await client.post(RESPONSES, json={"input": "hi", "stream": True})).text)
        whole = await client.post(RESPONSES, json={"input": "hi"})
        kept = await client.get(f"{RESPONSES}/{told[0]['response']['id']}")
    assert told[-1]["type"] == "response.failed" and told[-1]["response"]["status"] == "failed"
    assert "a planted fault" in told[-1]["response"]["error"]["message"]
    assert whole.status_code == 500 and whole.json()["error"]["code"] == "step_failed"
    assert kept.status_code == 404


# -- bad input ---------------------------------------------------------------------------------------------------------

USER = {"role": "user", "content": "hi"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
DEEP: Any = "x"
for _ in range(200):
    DEEP = [{"type": "input_text", "text": DEEP}]
BAD_INPUTS: dict[str, Any] = {
    "absent": None,
    "a number": 3,
    "nothing": [],
    "no item": ["hi"],
    "no type": [{}],
    "unknown type": [{"type": "computer_call"}],
    "type is a list": [{"type": ["message"], "role": "user", "content": "a"}],
    "a reference": [{"type": "item_reference", "id": "msg_1"}],
    "no role": [{"type": "message", "content": "a"}],
    "odd role": [{"role": "tool", "content": "a"}],
    "role is an object": [{"role": {}, "content": "a"}],
    "no content": [{"role": "user"}],
    "content is a number": [{"role": "user", "content": 3}],
    "an image": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:x"}]}],
    "a part without text": [{"role": "user", "content": [{"type": "input_text"}]}],
    "odd field of a part": [{"role": "user", "content": [{"type": "input_text", "text": "a", "b": 1}]}],
    "recursive parts": [{"role": "user", "content": DEEP}],
    "odd field": [{**USER, "name": "x"}],
    "odd field behind a null": [{**USER, "odd": None, "name": "x"}],
    "odd field of a part behind a null": [
        {"role": "user", "content": [{"type": "input_text", "text": "a", "odd": None, "b": 1}]}
    ],
    "odd field of reasoning": [
        USER,
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x", "signature": "y"}]},
    ],
    "odd status": [{**USER, "status": "done"}],
    "status is a list": [{**USER, "status": ["completed"]}],
    "reasoning alone": [{"type": "reasoning", "content": []}],
    "id is a number": [{**USER, "id": 3}],
    "an id twice": [{**USER, "id": "msg_1"}, {**USER, "id": "msg_1"}],
    "no call id": [USER, {**CALL, "call_id": None}],
    "arguments are an object": [USER, {**CALL, "arguments": {}}],
    "result of nothing": [USER, {"type": "function_call_output", "call_id": "c", "output": "x"}],
    "output is an object": [USER, CALL, {"type": "function_call_output", "call_id": "c", "output": {}}],
    "encrypted": [USER, {"type": "reasoning", "encrypted_content": "x", "summary": []}],
    "reasoning is text": [USER, {"type": "reasoning", "content": "x"}],
    "parts of another type": [USER, {"type": "reasoning", "content": [{"type": "text", "text": "x"}]}],
    "too many": [USER] * 16_385,
    "longer than the context": "x" * 3000,
    "no unicode": "a\ud800",
}
BAD_FIELDS: dict[str, dict[str, Any]] = {
    "background": {"background": True},
    "truncation": {"truncation": "auto"},
    "conversation": {"conversation": "conv_1"},
    "prompt": {"prompt": {"id": "p"}},
    "n": {"n": 2},
    "max_tokens": {"max_tokens": 3},
    "messages": {"messages": [USER]},
    "response_format": {"response_format": {"type": "json_object"}},
    "nonsense": {"nonsense": 1},
    "temperature": {"temperature": "hot"},
    "top_p": {"top_p": 3},
    "max_output_tokens": {"max_output_tokens": 0},
    "include": {"include": ["file_search_call.results"]},
    "metadata": {"metadata": {str(index): "x" for index in range(17)}},
    "tools": {"tools": [{"type": "web_search"}]},
    "tool_choice": {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "get_time"}}},
    "text": {"text": {"format": {"type": "grammar"}}},
    "reasoning": {"reasoning": {"effort": 3}},
    "stream_options": {"stream_options": {"include_obfuscation": False}},
    "previous_response_id": {"previous_response_id": ""},
    "store": {"store": "yes"},
}
MORE_BAD: list[tuple[str, dict[str, Any]]] = [
    ("tools", {"tools": [{"type": "function", "name": "a b"}]}),
    ("tools", {"tools": [{"type": "function", "name": "a", "defer_loading": True}]}),
    ("tools", {"tools": [{"type": "function", "name": "a", "parameters": 3}]}),
    ("tools", {"tools": [{"type": "function", "name": "a", "description": 3}]}),
    ("tools", {"tools": [{"type": "function", "name": "a"}] * 2}),
    ("tools", {"tools": [{"type": "function", "name": "a", "strict": True, "parameters": {"not": {}}}]}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "function", "name": "nobody"}}),
    ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [3]}}),
    (
        "tool_choice",
        {
            "tools": TOOLS,
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "x"}]},
        },
    ),
    (
        "tool_choice",
        {
            "tools": TOOLS,
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "get_time"}],
                "most": 1,
            },
        },
    ),
    (
        "tool_choice",
        {
            "tools": TOOLS,
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "get_time", "strict": True}],
            },
        },
    ),
    ("text", {"text": {"format": {"type": "json_schema", "name": "a b", "schema": {}}}}),
    ("text", {"text": {"format": {"type": "json_schema", "name": "a"}}}),
    ("text", {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"not": {"type": "null"}}}}}),
    ("text", {"text": {"format": {"type": ["text"]}}}),
    ("text", {"text": {"style": "plain"}}),
]


@pytest.mark.row(ROW, "bad input is a 400 that names its place, and nothing runs")
async def test_bad_input_is_refused_by_name() -> None:
    async with server(source=HERMES) as (client, running):
        for name, given in BAD_INPUTS.items():
            for more in ({}, {"stream": True}):
                reply = await client.post(
                    RESPONSES,
                    content=json.dumps({"input": given, **more}),
                    headers={"content-type": "application/json"},
                )
                error = reply.json()["error"]
                assert reply.status_code == 400, (name, reply.text)
                assert error["param"] == "input" or error["code"] == "invalid_json", (name, error)
                assert len(error["message"]) < 1100
        for name, fields in [*BAD_FIELDS.items(), *MORE_BAD]:
            reply = await client.post(RESPONSES, json={"input": "hi", **fields})
            assert reply.status_code == 400, (fields, reply.text)
            assert reply.json()["error"]["param"].partition(".")[0] == name, (fields, reply.text)
        assert not running.engine.statistics().running
        known = (
            await client.post(RESPONSES, json={"input": "hi", "truncation": "disabled", "background": False})
        ).json()
    assert known["status"] == "completed" and known["truncation"] == "disabled" and known["background"] is False


async def test_what_is_accepted_and_not_done_is_said() -> None:
    asked = {
        "input": [
            {**USER, "type": "message", "status": "completed"},
            {"type": "reasoning", "summary": [], "id": "rs_1"},
        ],
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"verbosity": "low"},
        "user": "me",
        "max_tool_calls": 3,
        "service_tier": "auto",
    }
    async with server() as (client, _):
        reply = await client.post(RESPONSES, json=asked)
        stored = await client.get(f"{RESPONSES}/{reply.json()['id']}", params={"stream": "true"})
        included = await client.get(f"{RESPONSES}/{reply.json()['id']}", params={"include": "x"})
    notice = reply.headers["x-infer-notice"]
    assert all(name in notice for name in ("include", "reasoning.summary", "text.verbosity", "user", "max_tool_calls"))
    assert "service_tier" not in notice and reply.json()["reasoning"]["effort"] == "low"
    assert (stored.status_code, stored.json()["error"]["param"]) == (400, "stream")
    assert (included.status_code, included.json()["error"]["param"]) == (400, "include")


async def test_a_response_is_explained_under_its_id() -> None:
    async with server(admin=True) as (client, _):
        made = (await client.post(RESPONSES, json={"input": "hi"}, headers={"x-request-id": "mine"})).json()["id"]
        explained = await client.get("/explain", params={"request_id": made})
    assert explained.status_code == 200 and explained.json()["request_id"] == made


async def test_many_at_once_have_ids_and_answers_of_their_own() -> None:
    async with server(lambda ids, sampling: 97 + (sum(ids) + len(ids)) % 26, responses_max_count=3) as (client, _):
        made: dict[int, dict[str, Any]] = {}

        async def one(index: int) -> None:
            reply = await client.post(RESPONSES, json={"input": f"question {index}", "max_output_tokens": 4})
            made[index] = reply.json()
            await client.delete(f"{RESPONSES}/{made[index]['id']}")

        async with anyio.create_task_group() as tasks:
            for index in range(12):
                tasks.start_soon(one, index)
        left = [(await client.get(f"{RESPONSES}/{one['id']}")).status_code for one in made.values()]
    assert len({response["id"] for response in made.values()}) == 12 and set(left) == {404}
