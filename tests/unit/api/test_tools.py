"""Tool calls and reasoning in chat over a scripted engine: exact texts in several formats, choices, grammars, refusals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest

from api_server import events, in_process
from infer import EngineConfig
from infer.engine.step import SamplingSpec
from infer.errors import UnknownPluginError
from infer.testing.fake_engine import EOS, scripted
from served import letters

pytestmark = pytest.mark.anyio
CORE = "TOOLS-CALLING-CORE"
CHAT = "/v1/chat/completions"
TURNS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}\n{% endfor %}"
)
ASSISTANT = "{% if add_generation_prompt %}<assistant>{% endif %}"


def template(marks: str, *, ending: str = ASSISTANT) -> str:
    return f"{{# {marks} #}}{{% if tools %}}{{{{ tools | tojson }}}}\n{{% endif %}}{TURNS}{ending}"


HERMES = template("<tool_call>")
LLAMA = template('{"name": function name, "parameters": dictionary of argument name')
MISTRAL = template("[TOOL_CALLS]")
R1 = template("<｜tool▁calls▁begin｜><｜tool▁sep｜>```json</think>", ending=f"{ASSISTANT}<think>\n")
CODER = template("<function=")
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Tomorrow's", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "get_time"}},
]
SCHEMAS: dict[str, Any] = {"get_weather": WEATHER, "get_time": {"type": "object"}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def ask(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, **more}


def server(answer: Any, source: str | None, **settings: Any) -> Any:
    model = {} if source is None else {"chat_template": source}
    config = EngineConfig(model=model, cache={"num_blocks": 4096}, api=settings)
    next_token = scripted(answer) if isinstance(answer, str) else answer
    return in_process(next_token, config=config, settings=settings)


def assembled(text: str) -> tuple[dict[str, Any], list[str], dict[str, Any]]:
    """(message, finish reasons, usage) of a stream; the first delta of a call has its id, type and name."""
    message: dict[str, Any] = {"content": ""}
    reasons, usage = [], {}
    for data in events(text)[:-1]:
        chunk = json.loads(data)
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            if choice["finish_reason"]:
                reasons.append(choice["finish_reason"])
            delta = choice["delta"]
            for name in ("content", "reasoning", "reasoning_content"):
                if name in delta:
                    message[name] = message.get(name, "") + delta[name]
            for call in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                if call["index"] == len(calls):
                    assert call["id"] and call["type"] == "function" and call["function"]["name"]
                    calls.append({"id": call["id"], "type": "function", "function": dict(call["function"])})
                else:
                    assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message, reasons, usage


async def both(client: Any, body: dict[str, Any]) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """(message, finish reason, usage), the same whole and streamed."""
    headers = {"x-request-id": "mine"}
    reply = await client.post(CHAT, json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    [choice] = reply.json()["choices"]
    streamed = await client.post(
        CHAT, json={**body, "stream": True, "stream_options": {"include_usage": True}}, headers=headers
    )
    message, reasons, usage = assembled(streamed.text)
    whole = choice["message"]
    assert message == {k: v or "" for k, v in whole.items() if k not in ("role", "refusal")}
    assert reasons == [choice["finish_reason"]]
    assert usage["completion_tokens"] == reply.json()["usage"]["completion_tokens"]
    details = "completion_tokens_details"
    assert usage.get(details) == reply.json()["usage"].get(details)
    return whole, choice["finish_reason"], usage


def names(message: dict[str, Any]) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]


OSLO = '{"city": "Oslo", "days": 3}'
R1_CALL = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
R1_CALLS = f"<｜tool▁calls▁begin｜>{R1_CALL.format('get_weather', OSLO)}\n{R1_CALL.format('get_time', '{}')}<｜tool▁calls▁end｜>"
HERMES_CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
TWO = f'{{"name": "get_weather", "arguments": {OSLO}}}', '{"name": "get_time", "arguments": {}}'
DIALECTS = {
    "hermes": (
        HERMES,
        "I look.\n" + HERMES_CALL % ("get_weather", OSLO) + "\n" + HERMES_CALL % ("get_time", "{}"),
        "I look.\n",
        None,
    ),
    "llama3_json": (LLAMA, "; ".join(TWO).replace("arguments", "parameters"), None, None),
    "mistral": (MISTRAL, f"Hm.[TOOL_CALLS] [{', '.join(TWO)}]", "Hm.", None),
    "deepseek_r1": (R1, f"They want wörds.</think>\n\n{R1_CALLS}", None, "They want wörds."),
}
"""Format -> (template, what the model writes, content, reasoning)."""


@pytest.mark.row(CORE, "the assembled stream equals the non-streamed tool calls byte for byte")
@pytest.mark.row(CORE, "id, type and name come in the first delta of a call")
@pytest.mark.row("SAMPLE-REASONING", "over HTTP, whole and streamed")
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_calls_of_a_known_format(dialect: str) -> None:
    source, text, content, reasoning = DIALECTS[dialect]
    async with server(text, source) as (client, _):
        message, reason, usage = await both(client, ask())
    assert names(message) == [("get_weather", OSLO), ("get_time", "{}")]
    assert reason == "tool_calls"
    assert message["content"] == content
    assert message.get("reasoning") == message.get("reasoning_content") == reasoning
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == 2
    assert all(len(given) == 9 for given in ids) is (dialect == "mistral")
    if reasoning is not None:  # one token is one byte here
        assert usage["completion_tokens_details"] == {"reasoning_tokens": len(reasoning.encode())}


async def test_ids_differ_between_requests() -> None:
    async with server(DIALECTS["mistral"][1], MISTRAL) as (client, _):
        given = [
            call["id"]
            for _ in range(2)
            for call in (await client.post(CHAT, json=ask())).json()["choices"][0]["message"]["tool_calls"]
        ]
    assert len(set(given)) == 4


@pytest.mark.row("SAMPLE-REASONING", "include_reasoning=false hides it and counts it")
async def test_reasoning_without_tools_shown_and_hidden() -> None:
    async with server("Why?</think>\n\nBecause <b>.", R1) as (client, _):
        shown, reason, usage = await both(client, ask(tools=None))
        hidden, _, same = await both(client, ask(tools=None, include_reasoning=False))
    assert (shown["reasoning_content"], shown["content"], reason) == ("Why?", "\n\nBecause <b>.", "stop")
    assert "reasoning" not in hidden and "reasoning_content" not in hidden
    assert hidden["content"] == shown["content"]
    assert usage["completion_tokens_details"] == same["completion_tokens_details"] == {"reasoning_tokens": 4}


async def test_reasoning_that_is_cut_off_is_no_content() -> None:
    async with server("Why? Because of all this", R1) as (client, _):
        message, reason, usage = await both(client, ask(tools=None, max_tokens=10))
    assert (message["reasoning"], message["content"], reason) == ("Why? Becau", None, "length")
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 10}


async def test_a_call_that_is_cut_off_is_as_far_as_it_came_and_no_reason_to_call() -> None:
    text = '<tool_call>{"name": "get_time", "arguments": {"a": "bcdef"}}</tool_call>'
    async with server(text, HERMES) as (client, _):
        message, reason, _ = await both(client, ask(max_tokens=text.index("def")))
    assert names(message) == [("get_time", '{"a": "bc')]
    assert reason == "length"


@pytest.mark.row(CORE, "tool_choice none: no calls, and no tools in the prompt")
async def test_none() -> None:
    text = DIALECTS["hermes"][1]
    async with server(text, HERMES) as (client, _):
        message, reason, _ = await both(client, ask(tool_choice="none"))
        plain = await client.post(f"{CHAT}/render", json=ask(tool_choice="none"))
        shown = await client.post(f"{CHAT}/render", json=ask())
    assert message["content"] == text and "tool_calls" not in message and reason == "stop"
    assert "get_weather" not in plain.json()["prompt_text"]
    assert "get_weather" in shown.json()["prompt_text"]


async def test_one_call_at_most() -> None:
    async with server(DIALECTS["hermes"][1], HERMES) as (client, _):
        message, reason, _ = await both(client, ask(parallel_tool_calls=False))
    assert names(message) == [("get_weather", OSLO)] and reason == "tool_calls"


CHOICES = [
    ("required", {"tool_choice": "required"}, {"get_weather", "get_time"}),
    ("named", {"tool_choice": NAMED}, {"get_weather"}),
    ("one", {"tool_choice": "required", "parallel_tool_calls": False}, {"get_weather", "get_time"}),
]
SOURCES = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL, "coder": CODER, "unknown": None}


def closing(token_ids: Sequence[int], sampling: SamplingSpec) -> int:
    """Random letters that like to end what a grammar lets them end."""
    drawn = letters(token_ids, sampling)
    return EOS if drawn % 3 == 0 else ord('"') if drawn % 3 == 1 else drawn


@pytest.mark.row(CORE, "required or named choice always yields a call that validates against its schema")
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("choice", CHOICES, ids=[name for name, *_ in CHOICES])
async def test_required_and_named_choice(source: str, choice: tuple[str, dict[str, Any], set[str]]) -> None:
    """Random text, held to the grammar: in the model's own format, or in a generic one where that has none."""
    kind, asked, allowed = choice
    async with server(closing, SOURCES[source]) as (client, _):
        for seed in range(3):
            body = ask(**asked, seed=seed, max_tokens=1500)
            message, reason, _ = await both(client, body)
            assert reason in ("tool_calls", "length"), message
            calls = names(message) if reason == "tool_calls" else names(message)[:-1]
            assert reason == "length" or calls
            assert kind == "required" or len(calls) <= 1
            assert reason == "length" or not (message["content"] or "").strip()
            for name, arguments in calls:
                assert name in allowed
                jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.row("SAMPLE-THINKING-BUDGET", "a call that must be made comes after the reasoning, and its budget")
async def test_required_after_reasoning() -> None:
    def thinking(token_ids: Sequence[int], sampling: SamplingSpec) -> int:
        return closing(token_ids, sampling) if b"</think>" in bytes(i % 256 for i in token_ids) else ord("x")

    async with server(thinking, R1) as (client, _):
        body = ask(tool_choice=NAMED, thinking_token_budget=7, max_tokens=1500, seed=3)
        message, reason, usage = await both(client, body)
    assert message["reasoning"] == "x" * 7
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 7}
    [(name, arguments)] = names(message)
    assert reason == "tool_calls" and name == "get_weather"
    jsonschema.validate(json.loads(arguments), WEATHER)


async def test_strict_tools_with_auto_hold_where_a_call_is_made() -> None:
    """The script wants arguments that the schema does not allow; the text around the call is its own."""
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]
    script = 'Ok.<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 77}}\n</tool_call>'
    async with server(scripted(script), HERMES) as (client, _):
        loose, _, _ = await both(client, ask())
        held, _, _ = await both(client, ask(tools=strict, max_tokens=len(script)))
        plain, reason, _ = await both(client, ask(tools=strict, max_tokens=3))
        llama = await client.post(CHAT, json=ask(tools=strict))
    assert names(loose) == [("get_weather", '{"city": "Oslo", "days": 77}')]
    assert names(held)[0][1].startswith('{"city": "Oslo", "days": 7')
    assert "77" not in names(held)[0][1]
    assert plain["content"] == "Ok." and reason == "length"
    assert llama.status_code == 200
    async with server("x", LLAMA) as (client, _):
        refused = await client.post(CHAT, json=ask(tools=strict))
        form = await client.post(CHAT, json=ask(response_format={"type": "json_object"}))
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "tools"
    assert "strict" in refused.json()["error"]["message"]
    assert form.status_code == 400 and form.json()["error"]["param"] == "response_format"


@pytest.mark.parametrize("script", ['{"ok": true}', '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'])
async def test_a_form_of_the_answer_beside_tools(script: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": {"type": "object", "required": ["ok"]}}}
    async with server(script, HERMES) as (client, _):
        message, reason, _ = await both(client, ask(response_format=form))
    assert (names(message), reason) == (([("get_time", "{}")], "tool_calls") if "tool" in script else ([], "stop"))
    assert message["content"] == (None if "tool" in script else script)


async def test_the_history_reaches_the_template() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_time", "arguments": '{"zone": "CET"}'}}
    history = [
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
    ]
    async with server("It is noon.", HERMES) as (client, _):
        known = (await client.post(f"{CHAT}/render", json=ask(messages=history))).json()["prompt_text"]
        answered, reason, _ = await both(client, ask(messages=history))
    assert '"zone": "CET"' in known and "<tool>noon" in known
    assert answered["content"] == "It is noon." and reason == "stop"
    async with server("It is noon.", None) as (client, _):
        reply = await client.post(f"{CHAT}/render", json=ask(messages=history))
        told = reply.json()["prompt_text"]
    assert "tools" in reply.headers["x-infer-notice"]
    assert told.startswith("<system>You can call") and '"name": "get_weather"' in told
    assert '<assistant><tool_call>\n{"name": "get_time", "arguments": {"zone": "CET"}}\n</tool_call>' in told
    assert "<user><tool_response>\nnoon\n</tool_response>" in told


async def test_a_template_that_knows_no_tools_gets_them_in_words_and_calls_are_found() -> None:
    text = f'<tool_call>\n{{"name": "get_weather", "arguments": {OSLO}}}\n</tool_call>'
    async with server(text, None) as (client, _):
        message, reason, _ = await both(client, ask())
    assert names(message) == [("get_weather", OSLO)] and reason == "tool_calls"


@pytest.mark.row(CORE, "parsers can be named; an unknown name lists the registry")
async def test_parsers_by_name() -> None:
    text = f'A</think>[TOOL_CALLS] [{{"name": "get_weather", "arguments": {OSLO}}}]'
    opened = template("nothing", ending=f"{ASSISTANT}<think>")
    async with server(text, opened, tool_parser="mistral", reasoning_parser="deepseek_r1") as (client, _):
        message, reason, _ = await both(client, ask())
    assert (message["reasoning"], names(message), reason) == ("A", [("get_weather", OSLO)], "tool_calls")
    async with server(text, R1, reasoning_parser="none") as (client, _):
        kept, _, _ = await both(client, ask(tools=None))
    assert kept["content"] == text
    async with server("x", HERMES, tool_parser="none") as (client, _):
        off = await client.post(CHAT, json=ask())
    assert off.status_code == 400 and "api.tool_parser" in off.json()["error"]["message"]
    for setting in ("tool_parser", "reasoning_parser"):
        with pytest.raises(UnknownPluginError, match=r"hermes.*qwen3_coder"):
            async with server("x", HERMES, **{setting: "hermess"}):
                pass


FUNCTION = TOOLS[0]["function"]
BAD_TOOL = {"type": "function", "function": {**FUNCTION, "parameters": {"type": "object", "not": {}}}}
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "kind": ({"tools": [{"type": "web_search"}]}, "tools", "web_search"),
    "no function": ({"tools": [{"type": "function"}]}, "tools", "function"),
    "name": ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "a b"),
    "twice": ({"tools": [*TOOLS, TOOLS[0]]}, "tools", "twice"),
    "schema": ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]}, "tools", "parameters"),
    "strict": ({"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]}, "tools", "strict"),
    "too many": ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]}, "tools", "129"),
    "choice": ({"tool_choice": "any"}, "tool_choice", "any"),
    "choice kind": ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "allowed_tools"),
    "stranger": ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "get_weather"),
    "without": ({"tools": [], "tool_choice": "required"}, "tool_choice", "needs tools"),
    "bad schema": ({"tools": [BAD_TOOL], "tool_choice": "required"}, "tools", "not"),
    "form": ({"structured_outputs": {"regex": "a"}}, "structured_outputs", "JSON"),
    "legacy": ({"tools": None, "functions": [FUNCTION]}, "functions", "tools"),
}  # fmt: skip


@pytest.mark.row(CORE, "what cannot be done is a 400 that names the field")
@pytest.mark.parametrize("case", REFUSED)
async def test_refusals(case: str) -> None:
    body, field, word = REFUSED[case]
    async with server("x", HERMES) as (client, _):
        for stream in (False, True):
            reply = await client.post(CHAT, json=ask(**body, stream=stream))
            assert reply.status_code == 400, reply.text
            assert reply.json()["error"]["param"] == field, reply.text
            assert word in reply.json()["error"]["message"]


async def test_auto_needs_a_known_format_where_the_template_writes_tools() -> None:
    async with server("x", template("unheard of")) as (client, _):
        reply = await client.post(CHAT, json=ask())
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "tool_choice"
    assert "api.tool_parser" in reply.json()["error"]["message"]


async def test_the_two_halves_of_chat_give_the_same() -> None:
    """render, generate, derender: as the chat route answers."""
    source, text, _, _ = DIALECTS["deepseek_r1"]
    async with server(text, source) as (client, _):
        whole = (await client.post(CHAT, json=ask())).json()["choices"][0]
        rendered = (await client.post(f"{CHAT}/render", json=ask())).json()
        generated = await client.post("/inference/v1/generate", json={**rendered, "stream": False})
        body = {
            "generate_response": generated.json(),
            "chat_request": ask(),
            "prompt_token_ids": rendered["token_ids"],
        }
        derendered = (await client.post(f"{CHAT}/derender", json=body)).json()["choices"][0]
    for one in (whole, derendered):
        for call in one["message"]["tool_calls"]:
            assert call.pop("id")
    assert derendered["message"] == whole["message"]
    assert derendered["finish_reason"] == whole["finish_reason"] == "tool_calls"


async def test_several_choices_have_their_own_calls() -> None:
    async with server(DIALECTS["hermes"][1], HERMES) as (client, _):
        reply = await client.post(CHAT, json=ask(n=2))
    ids = [call["id"] for choice in reply.json()["choices"] for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 4
