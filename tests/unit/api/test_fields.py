"""Every documented field is honoured, accepted with a notice, or refused by name; unknown ones are refused by default."""

from __future__ import annotations

from typing import Any

import pytest

from api_server import MODEL, in_process
from infer.api.openai.responses.schemas import RESPONSES
from infer.api.openai.schemas import CHAT, COMPLETION

CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"


@pytest.mark.row("X-STRICT-FIELDS", "every field that the openai client documents is in the table")
def test_the_table_covers_openais_fields() -> None:
    from openai.types.chat.completion_create_params import CompletionCreateParamsBase as Chat
    from openai.types.completion_create_params import CompletionCreateParamsBase as Completion
    from openai.types.responses.response_create_params import ResponseCreateParamsBase as Responses

    assert {*Chat.__annotations__} - CHAT.known() == set()
    assert {*Completion.__annotations__} - COMPLETION.known() == set()
    assert {*Responses.__annotations__} - RESPONSES.known() == set()


@pytest.mark.row("X-STRICT-FIELDS", "the list is generated from code")
@pytest.mark.parametrize("body", [CHAT, COMPLETION, RESPONSES], ids=["chat", "completion", "responses"])
def test_the_table_names_each_field_once_with_a_reason(body: Any) -> None:
    rules = list(body.rules())
    names = [rule.name for rule in rules]
    assert len(names) == len(set(names)) and set(names) == body.known()
    assert all(rule.note for rule in rules if rule.name not in ("continuous_usage_stats",)), [
        rule.name for rule in rules if not rule.note
    ]
    assert {rule.treatment for rule in rules} == {"honoured", "notice", "refused"}


ASKING: dict[str, Any] = {
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "modalities": ["text", "audio"],
    "spaces_between_special_tokens": "x",
    "best_of": 2,
    "store": True,
    "service_tier": "flex",
}


@pytest.mark.anyio
@pytest.mark.row("X-STRICT-FIELDS", "a field that asks for something is refused by name, or told in the headers")
async def test_what_is_not_honoured_is_said() -> None:
    async with in_process() as (client, _):
        for path, body, base in (
            (CHAT_PATH, CHAT, {"messages": [{"role": "user", "content": "hi"}]}),
            (COMPLETION_PATH, COMPLETION, {"prompt": "hi"}),
            ("/v1/responses", RESPONSES, {"input": "hi"}),
        ):
            for name, rule in body.unsupported.items():
                reply = await client.post(path, json={**base, name: ASKING.get(name, "x")})
                if rule.refused:
                    assert (reply.status_code, reply.json()["error"]["param"]) == (400, name), name
                else:
                    assert reply.status_code == 200 and name in reply.headers["x-infer-notice"], name


@pytest.mark.anyio
@pytest.mark.row("X-STRICT-FIELDS", "values that ask for nothing pass in silence")
async def test_harmless_values_pass() -> None:
    harmless = {
        "tools": None,
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "functions": [],
        "parallel_tool_calls": True,
        "modalities": ["text"],
        "skip_special_tokens": True,
        "use_beam_search": False,
        "store": False,
        "metadata": None,
        "suffix_of_nobody": None,
    }
    unknown = harmless.pop("suffix_of_nobody")
    async with in_process() as (client, _):
        base = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
        reply = await client.post(CHAT_PATH, json={**base, **harmless})
        null = await client.post(CHAT_PATH, json={**base, "suffix_of_nobody": unknown})
    assert reply.status_code == 200 and "x-infer-notice" not in reply.headers
    assert null.json()["error"]["param"] == "suffix_of_nobody"


@pytest.mark.anyio
@pytest.mark.row("X-STRICT-FIELDS", "api.unknown_fields=notice lets foreign fields in and says so")
async def test_unknown_fields() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "temprature": 0.5, "zzz": 1}
    async with in_process() as (client, _):
        refused = await client.post(CHAT_PATH, json=body)
    async with in_process(settings={"unknown_fields": "notice"}) as (client, _):
        told = await client.post(CHAT_PATH, json={**body, "stream": True})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "temprature")
    assert "did you mean 'temperature'" in error["message"]
    assert told.status_code == 200
    assert "temprature: unknown" in told.headers["x-infer-notice"] and "zzz" in told.headers["x-infer-notice"]
