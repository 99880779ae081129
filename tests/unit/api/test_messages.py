"""Anthropic's Messages API over a scripted engine: events and blocks exactly, whole as streamed, conversions, refusals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest

from api_server import MODEL, in_process
from infer import EngineConfig
from infer.api.anthropic.conversation import ConversationReader
from infer.api.anthropic.schemas import ConversationBody
from infer.engine.step import SamplingSpec
from infer.testing.fake_engine import EOS, scripted
from served import letters

pytestmark = pytest.mark.anyio
ROW = "SERVE-RESPONSES-MESSAGES"
MESSAGES, COUNT, CHAT = "/v1/messages", "/v1/messages/count_tokens", "/v1/chat/completions"
TEMPLATE = (
    "{# <tool_call> <think> #}{{ tools | tojson if tools else '' }}{% for m in messages %}<{{ m.role }}>"
    "{{ '<think>' ~ m.reasoning_content ~ '</think>' if m.reasoning_content else '' }}{{ m.content }}"
    "{{ m.tool_calls | tojson if m.tool_calls else '' }}\n{% endfor %}"
    "{{ '<assistant>' if add_generation_prompt else '' }}{{ '<think></think>' if enable_thinking is false else '' }}"
    "{{ '[' ~ reasoning_effort ~ ']' if reasoning_effort else '' }}"
)
CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
OSLO = '{"city": "Oslo", "days": [1, 2]}'
FULL = f"<think>They want wörds.</think>\n\nI look.\n{CALL % ('get_weather', OSLO)}\n{CALL % ('get_time', '{}')}"
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"name": "get_weather", "description": "Tomorrow's", "input_schema": WEATHER},
    {"name": "get_time", "input_schema": {"type": "object"}, "type": "custom", "cache_control": {"type": "ephemeral"}},
]
USER = [{"role": "user", "content": "hi"}]


def ask(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 400, "messages": USER, **more}


def server(answer: Any, source: str | None = TEMPLATE, **settings: Any) -> Any:
    model = {} if source is None else {"chat_template": source}
    config = EngineConfig(model=model, cache={"num_blocks": 4096}, api=settings)
    next_token = scripted(answer) if isinstance(answer, str) else answer
    return in_process(next_token, config=config, settings=settings)


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each under its own name."""
    found = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def followed(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of the events, in the documented order."""
    assert events[0]["type"] == "message_start" and events[1]["type"] == "ping"
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    message: dict[str, Any] = dict(events[0]["message"])
    assert message["content"] == [] and message["stop_reason"] is None
    blocks: list[dict[str, Any]] = []
    arguments: list[str] = []
    is_open = False
    for event in events[2:-2]:
        kind = event["type"]
        if kind == "content_block_start":
            assert not is_open and event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]))
            arguments.append("")
            is_open = True
            continue
        assert is_open and event["index"] == len(blocks) - 1
        if kind == "content_block_stop":
            if blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = json.loads(arguments[-1] or "{}")
            is_open = False
            continue
        delta = event["delta"]
        if delta["type"] == "input_json_delta":
            arguments[-1] += delta["partial_json"]
        else:
            name = delta["type"].removesuffix("_delta")
            assert delta[name]
            blocks[-1][name] += delta[name]
    assert not is_open
    return message | {"content": blocks, **events[-2]["delta"], "usage": events[-2]["usage"]}


async def both(client: Any, body: dict[str, Any]) -> dict[str, Any]:
    """The message, the same whole and streamed."""
    headers = {"x-request-id": "mine", "anthropic-version": "2023-06-01"}
    whole = await client.post(MESSAGES, json=body, headers=headers)
    assert whole.status_code == 200, whole.text
    streamed = await client.post(MESSAGES, json={**body, "stream": True}, headers=headers)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    message = followed(events_of(streamed.text))
    message["usage"], usage = whole.json()["usage"], message["usage"]
    assert total(usage) == total(message["usage"])
    assert message == whole.json()
    assert message["type"] == "message" and message["role"] == "assistant" and message["id"] == "msg_mine"
    assert whole.headers["request-id"] == "mine"
    return message


def total(usage: dict[str, Any]) -> tuple[int, int, int]:
    read = usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
    return read, usage["output_tokens"], usage["output_tokens_details"]["thinking_tokens"]


async def chat_usage(client: Any, body: dict[str, Any]) -> dict[str, Any]:
    reply = await client.post(CHAT, json=body)
    assert reply.status_code == 200, reply.text
    usage: dict[str, Any] = reply.json()["usage"]
    return usage


@pytest.mark.row(ROW, "Messages: thinking, text and calls are blocks in their order, and the counts are chat's")
async def test_thinking_text_and_calls() -> None:
    functions = [{"type": "function", "function": {"name": t["name"], "parameters": t["input_schema"]}} for t in TOOLS]
    functions[0]["function"] |= {"description": "Tomorrow's"}  # type: ignore[operator]
    async with server(FULL) as (client, _):
        message = await both(client, ask(tools=TOOLS, system="Be brief."))
        messages = [{"role": "system", "content": "Be brief."}, *USER]
        # In the order in which a template prints them, so that the prompts are the same to the byte.
        same = await chat_usage(
            client,
            {
                "messages": messages,
                "tools": [
                    {
                        "function": {"description": "Tomorrow's", "name": "get_weather", "parameters": WEATHER},
                        "type": "function",
                    },
                    {"function": {"name": "get_time", "parameters": {"type": "object"}}, "type": "function"},
                ],
            },
        )
    thinking, text, *calls = message["content"]
    assert len(thinking.pop("signature")) == 64
    assert thinking == {"type": "thinking", "thinking": "They want wörds."}
    assert text == {"type": "text", "text": "\n\nI look.\n"}
    assert [(call["name"], call["input"]) for call in calls] == [("get_weather", json.loads(OSLO)), ("get_time", {})]
    assert len({call["id"] for call in calls}) == 2 and calls[0]["id"].startswith("toolu_mine")
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    read, written, thought = total(message["usage"])
    assert (read, written) == (same["prompt_tokens"], same["completion_tokens"])
    assert thought == same["completion_tokens_details"]["reasoning_tokens"] == len("They want wörds.".encode())


@pytest.mark.row(ROW, "Messages: prompt tokens that came from the prefix cache are counted apart")
async def test_cached_tokens() -> None:
    body = ask(messages=[{"role": "user", "content": "x" * 200}], max_tokens=2)
    async with server("Yes.") as (client, _):
        first = (await client.post(MESSAGES, json=body)).json()["usage"]
        again = (await client.post(MESSAGES, json=body)).json()["usage"]
        streamed = events_of((await client.post(MESSAGES, json={**body, "stream": True})).text)
        same = await chat_usage(client, {"messages": body["messages"], "max_tokens": 2})
    assert first["cache_read_input_tokens"] == 0
    assert again["cache_read_input_tokens"] == same["prompt_tokens_details"]["cached_tokens"] > 100
    assert again["input_tokens"] + again["cache_read_input_tokens"] == first["input_tokens"] == same["prompt_tokens"]
    assert streamed[-2]["usage"] == again
    assert streamed[0]["message"]["usage"]["input_tokens"] == first["input_tokens"]


@pytest.mark.parametrize(
    ("more", "reason", "sequence", "text"),
    [
        ({}, "end_turn", None, "one two three"),
        ({"stop_sequences": ["xyz", " t"]}, "stop_sequence", " t", "one"),
        ({"max_tokens": 3}, "max_tokens", None, "one"),
        ({"max_tokens": 10**9}, "end_turn", None, "one two three"),
        ({"messages": [*USER, {"role": "assistant", "content": "one t"}]}, "end_turn", None, "wo three"),
    ],
    ids=["end", "stop", "length", "more_than_fits", "prefill"],
)
async def test_how_an_answer_ends(more: dict[str, Any], reason: str, sequence: str | None, text: str) -> None:
    async with server("one two three") as (client, _):
        message = await both(client, ask(**more))
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
    assert message["content"] == [{"type": "text", "text": text}]


async def test_the_end_of_the_context_is_not_the_limit_that_was_asked_for() -> None:
    async with server(lambda ids, sampling: ord("x")) as (client, _):
        message = await both(client, ask(max_tokens=100_000))
        too_long = await client.post(MESSAGES, json=ask(messages=[{"role": "user", "content": "x" * 5000}]))
    assert message["stop_reason"] == "model_context_window_exceeded"
    assert sum(total(message["usage"])[:2]) == 2048
    assert too_long.status_code == 400 and too_long.json()["error"]["type"] == "invalid_request_error"
    assert too_long.json()["error"]["details"] == {"error_code": "context_length_exceeded"}


async def test_a_deadline_pauses_the_turn() -> None:
    async with in_process(lambda ids, s: ord("x"), latency=0.02, settings={"request_deadline": 0.2}) as (client, _):
        reply = await client.post(MESSAGES, json=ask(max_tokens=2000))
    assert reply.json()["stop_reason"] == "pause_turn" and reply.json()["content"][0]["text"]


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        ("", []),
        (" \n ", [{"type": "text", "text": " \n "}]),
        (f"\n{CALL % ('get_time', '{}')}\n", ["get_time"]),
        (f"{CALL % ('get_time', '{}')}\nDone.", ["get_time", "text"]),
    ],
    ids=["nothing", "white", "white_before_call", "text_after_call"],
)
async def test_no_block_is_white_space_alone_beside_others(answer: str, shown: list[Any]) -> None:
    async with server(answer) as (client, _):
        message = await both(client, ask(tools=TOOLS))
    assert [
        block.get("name", "text") if isinstance(want, str) else block
        for block, want in zip(message["content"], shown, strict=True)
    ] == shown


async def test_a_call_that_is_cut_off_has_what_was_complete() -> None:
    text = CALL % ("get_time", '{"a": [1, 2], "b": "cdefgh"}')
    body = ask(tools=TOOLS, max_tokens=text.index("fgh"))
    async with server(text) as (client, _):
        whole = (await client.post(MESSAGES, json=body)).json()
        streamed = events_of((await client.post(MESSAGES, json={**body, "stream": True})).text)
    assert whole["stop_reason"] == "max_tokens"
    assert (whole["content"][0]["name"], whole["content"][0]["input"]) == ("get_time", {"a": [1, 2]})
    pieces = [event["delta"]["partial_json"] for event in streamed if event["type"] == "content_block_delta"]
    assert "".join(pieces) == '{"a": [1, 2], "b": "cde' and len(pieces) > 3


async def test_thinking_is_asked_for_bounded_hidden_and_omitted() -> None:
    async with server("<think>Hmmmmmmm.</think>Yes.") as (client, _):
        as_it_is = await both(client, ask())
        adaptive = await both(client, ask(thinking={"type": "adaptive", "display": "summarized"}))
        omitted = await both(client, ask(thinking={"type": "adaptive", "display": "omitted"}))
        off = await both(client, ask(thinking={"type": "disabled"}))
        effort = await client.post(COUNT, json={"messages": USER, "output_config": {"effort": "xhigh"}})
        plain = await client.post(COUNT, json={"messages": USER})
    assert as_it_is["content"] == adaptive["content"]
    assert [block["type"] for block in as_it_is["content"]] == ["thinking", "text"]
    assert omitted["content"][0] | {"signature": ""} == {"type": "thinking", "thinking": "", "signature": ""}
    assert omitted["content"][0]["signature"] == as_it_is["content"][0]["signature"]
    assert omitted["usage"]["output_tokens_details"] == as_it_is["usage"]["output_tokens_details"]
    assert [block["type"] for block in off["content"]] == ["text"]
    assert total(off["usage"])[0] == total(as_it_is["usage"])[0] + len("<think></think>")
    assert effort.json()["input_tokens"] == plain.json()["input_tokens"] + len("[xhigh]")


@pytest.mark.row(ROW, "Messages: thinking is closed after budget_tokens")
async def test_a_budget_for_thinking() -> None:
    def endless(token_ids: Sequence[int], sampling: SamplingSpec) -> int:
        said = bytes(token_id for token_id in token_ids if token_id < 256).rpartition(b"<assistant>")[2]
        script = b"Yes." if b"</think>" in said else b"<think>" + b"m" * len(said)
        done = len(said.rpartition(b"</think>")[2])
        return script[done] if done < len(script) else EOS

    async with server(endless) as (client, _):
        message = await both(client, ask(thinking={"type": "enabled", "budget_tokens": 3}))
    assert [block.get("thinking") or block.get("text") for block in message["content"]] == ["mmm", "Yes."]
    assert message["usage"]["output_tokens_details"] == {"thinking_tokens": 3}


async def test_a_model_that_does_not_reason_has_no_budget() -> None:
    async with server("Yes.", None) as (client, _):
        refused = await client.post(MESSAGES, json=ask(thinking={"type": "enabled", "budget_tokens": 30}))
        taken = await client.post(MESSAGES, json=ask(thinking={"type": "adaptive"}))
    assert refused.status_code == 400 and "thinking.budget_tokens" in refused.json()["error"]["message"]
    assert taken.status_code == 200 and "no reasoning" in taken.headers["x-infer-notice"]


@pytest.mark.row(ROW, "Messages: tool_choice any and tool hold the model to a call that fits its schema")
@pytest.mark.parametrize("source", [TEMPLATE, None], ids=["known", "told_in_words"])
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}], ids=["any", "tool"])
async def test_calls_that_must_be_made(source: str | None, choice: dict[str, Any]) -> None:
    body = ask(tools=TOOLS, tool_choice={**choice, "disable_parallel_tool_use": True}, max_tokens=1500)
    async with server(closing, source) as (client, _):
        message = await both(client, body)
    assert message["stop_reason"] in ("tool_use", "max_tokens")
    [call] = [block for block in message["content"] if block["type"] == "tool_use"]
    assert choice["type"] == "any" or call["name"] == "get_weather"
    if message["stop_reason"] == "tool_use" and call["name"] == "get_weather":
        jsonschema.validate(call["input"], WEATHER)


async def test_tool_choice_none_and_one_call_at_most() -> None:
    async with server(FULL) as (client, _):
        none = await both(client, ask(tools=TOOLS, tool_choice={"type": "none"}))
        one = await both(client, ask(tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True}))
    assert [block["type"] for block in none["content"]] == ["thinking", "text"]
    assert "<tool_call>" in none["content"][1]["text"] and none["stop_reason"] == "end_turn"
    assert [block.get("name") for block in one["content"]] == [None, None, "get_weather"]


async def test_a_form_of_the_answer() -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    body = ask(output_config={"format": {"type": "json_schema", "schema": schema}})
    async with server('{"ok": true}', None) as (client, _):
        message = await both(client, body)
    jsonschema.validate(json.loads(message["content"][0]["text"]), schema)


async def test_tokens_are_counted_without_a_run() -> None:
    body = {"model": MODEL, "messages": USER, "system": [{"type": "text", "text": "Be brief."}], "tools": TOOLS}
    async with server("Yes.") as (client, running):
        counted = await client.post(COUNT, json=body)
        assert running.engine.statistics().running == 0 and not running.worker.plans
        message = await client.post(MESSAGES, json={**body, "max_tokens": 3})
    assert counted.json() == {"input_tokens": total(message.json()["usage"])[0]}


def told(*messages: dict[str, Any], **more: Any) -> tuple[list[dict[str, Any]], list[str]]:
    reader = ConversationReader("refuse", [])
    return reader.messages(ConversationBody.model_validate({"messages": list(messages), **more})), reader.notices


def closing(token_ids: Sequence[int], sampling: SamplingSpec) -> int:
    """Letters, always the same for a text, that like to end what a grammar lets them end."""
    drawn = letters(token_ids, SamplingSpec(seed=3))
    return EOS if drawn % 3 == 0 else ord('"') if drawn % 3 == 1 else drawn


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


def test_a_conversation_with_every_block() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    messages, notices = told(
        {"role": "user", "content": "What is "},
        {"role": "user", "content": [text("the weather?", **cached)]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "abc"},
                {"type": "redacted_thinking", "data": "xyz"},
                text("I look.", citations=None),
                {
                    "type": "tool_use",
                    "id": "t1",
                    "name": "get_weather",
                    "input": {"city": "Oslo"},
                    "caller": {"type": "direct"},
                },
            ],
        },
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t2", "name": "get_time", "input": {}}]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [text("Snow."), text("A lot.")], **cached},
                {"type": "tool_result", "tool_use_id": "t2", "content": "no clock", "is_error": True},
                {"type": "tool_result", "tool_use_id": "t3"},
                text("Well?"),
            ],
        },
        {"role": "system", "content": "Hurry."},
        system=[text("Be brief.", **cached), text("Be kind.")],
    )
    assert messages == [
        {"role": "system", "content": [text("Be brief."), text("Be kind.")]},
        {"role": "user", "content": [text("What is "), text("the weather?")]},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}},
                {"id": "t2", "type": "function", "function": {"name": "get_time", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "Snow.\nA lot."},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: no clock"},
        {"role": "tool", "tool_call_id": "t3", "content": ""},
        {"role": "user", "content": "Well?"},
        {"role": "system", "content": "Hurry."},
    ]
    assert notices == ["messages[2].content[1]: redacted_thinking cannot be read here and is left out"]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
USE = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]}
REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "no_messages": ({"messages": []}, "messages"),
    "no_limit": ({"max_tokens": None}, "max_tokens is missing"),
    "zero": ({"max_tokens": 0}, "max_tokens=0"),
    "word": ({"max_tokens": "9"}, "max_tokens='9'"),
    "image": (
        {"messages": [{"role": "user", "content": [text("a"), IMAGE]}]},
        "messages[0].content[1]: blocks of type 'image'",
    ),
    "image_in_result": (
        {"messages": [{"role": "user", "content": [RESULT]}]},
        "blocks of type 'image' are not supported",
    ),
    "role": ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role='tool'"),
    "no_content": ({"messages": [{"role": "user"}]}, "messages[0].content=None"),
    "empty": ({"messages": [{"role": "user", "content": []}]}, "messages[0].content is empty"),
    "field_of_message": ({"messages": [{"role": "user", "content": "a", "name": "b"}]}, "messages[0].name"),
    "no_block": ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]='a'"),
    "field_of_block": (
        {"messages": [{"role": "user", "content": [text("a", txet="b")]}]},
        "messages[0].content[0]: unknown field 'txet'",
    ),
    "text": (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0]: text is missing",
    ),
    "place": (
        {"messages": [{"role": "user", "content": [USE]}]},
        "messages[0].content[0]: tool_use has no place in user content",
    ),
    "system": ({"system": [USE]}, "system[0]: tool_use has no place in system content"),
    "nothing_to_continue": (
        {"messages": [*USER, {"role": "assistant", "content": [USE]}]},
        "without text to go on with",
    ),
    "surrogate": ({"messages": [{"role": "user", "content": "\ud800"}]}, "not valid"),
    "unknown": ({"temprature": 1}, "did you mean 'temperature'"),
    "temperature": ({"temperature": -1}, "temperature=-1"),
    "top_k": ({"top_k": "many"}, "top_k='many'"),
    "stops": ({"stop_sequences": [""]}, "stop_sequences: stop takes"),
    "mcp": ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is not supported"),
    "container": ({"container": "c"}, "container is not supported"),
    "fast": ({"speed": "fast"}, "speed is not supported"),
    "place_of_server": ({"inference_geo": "eu"}, "inference_geo is not supported"),
    "server_tool": (
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "tools[0].type='web_search_20250305'",
    ),
    "no_schema": ({"tools": [{"name": "f"}]}, "tools[0]: input_schema is missing"),
    "endless_schema": (
        {"max_tokens": 9, "tools": [{"name": "f", "input_schema": {"$ref": "#"}}], "tool_choice": {"type": "any"}},
        "no value of the whole ever ends",
    ),
    "tool_name": ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name='a b'"),
    "twice": ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].name='get_weather' is there twice"),
    "deferred": ({"tools": [{**TOOLS[0], "defer_loading": True}]}, "tools[0]: defer_loading is not supported"),
    "choice": ({"tools": TOOLS, "tool_choice": {"type": "some"}}, "tool_choice: type='some'"),
    "choice_without_tools": ({"tool_choice": {"type": "any"}}, "needs tools"),
    "choice_unnamed": ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name is missing"),
    "choice_not_there": ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice names 'f'"),
    "choice_named": ({"tools": TOOLS, "tool_choice": {"type": "any", "name": "f"}}, "tool_choice.name='f'"),
    "thinking": ({"thinking": {"type": "between_tools"}}, "thinking: type='between_tools'"),
    "no_budget": ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens is missing"),
    "odd_budget": ({"thinking": {"type": "adaptive", "budget_tokens": 9}}, "thinking.budget_tokens=9 belongs"),
    "budget": ({"thinking": {"type": "enabled", "budget_tokens": 400}}, "is not less than max_tokens=400"),
    "form": ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
    "schema": (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "odd"}}}},
        "output_config.format",
    ),
    "effort": ({"output_config": {"effort": "more"}}, "output_config: effort='more'"),
    "version": ({}, "anthropic-version: '2099-01-01' is not supported"),
}


@pytest.mark.row(ROW, "Messages: unsupported fields answer 400 by name, in Anthropic's error body")
async def test_refusals_say_what_and_where() -> None:
    async with server("x") as (client, _):
        for name, (more, said) in REFUSALS.items():
            headers = {"anthropic-version": "2099-01-01"} if name == "version" else {}
            content = json.dumps(ask(**more))  # a lone surrogate is sent as an escape
            for path in (MESSAGES, COUNT):
                if path == COUNT and not set(more) <= {"messages", "system", "tools", "tool_choice"}:
                    continue
                sent = content if path == MESSAGES else json.dumps({"messages": USER, **more})
                reply = await client.post(path, content=sent, headers=headers)
                assert reply.status_code == 400, (name, path, reply.text)
                body = reply.json()
                assert set(body) == {"type", "error"} and body["type"] == "error"
                assert body["error"]["type"] == "invalid_request_error"
                assert said in body["error"]["message"], (name, path)


async def test_other_errors_have_anthropic_s_types() -> None:
    async with server("x", api_keys=("secret",), max_body_bytes=2000) as (client, running):
        key = {"x-api-key": "secret"}
        replies = {
            "authentication_error": await client.post(MESSAGES, json=ask()),
            "not_found_error": await client.post(MESSAGES, json=ask(model="other"), headers=key),
            "request_too_large": await client.post(MESSAGES, content=b"x" * 3000, headers=key),
            "invalid_request_error": await client.post(MESSAGES, content=b"{", headers=key),
        }
        other_method = await client.get(COUNT, headers=key)
        good = await client.post(MESSAGES, json=ask(), headers=key)
        running.calls.draining = True
        replies["api_error"] = await client.post(MESSAGES, json=ask(), headers=key)
    assert good.status_code == 200
    assert (other_method.status_code, other_method.headers["allow"]) == (405, "POST")
    assert other_method.json()["error"]["type"] == "invalid_request_error" and other_method.json()["type"] == "error"
    for kind, reply in replies.items():
        assert reply.status_code >= 400 and reply.json()["error"]["type"] == kind
    assert replies["api_error"].status_code == 503 and "retry-after" in replies["api_error"].headers


async def test_notices() -> None:
    async with server("x", None) as (client, _):
        reply = await client.post(
            MESSAGES,
            json=ask(metadata={"user_id": "me"}, context_management={"edits": []}, service_tier="auto", tools=TOOLS),
            headers={"anthropic-beta": "new-things-2099-01-01"},
        )
        lenient = await client.post(MESSAGES, json=ask(cache_control={"type": "ephemeral"}))
    said = reply.headers["x-infer-notice"]
    assert all(
        part in said for part in ("metadata", "context_management", "anthropic-beta", "tools: the chat template")
    )
    assert "service_tier" not in said and "x-infer-notice" not in lenient.headers
