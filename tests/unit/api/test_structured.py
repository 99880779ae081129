"""Constrained output over HTTP: every spelling that clients have for it, and refusals that name the client's field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from api_server import in_process
from served import letters

pytestmark = pytest.mark.anyio
CORE = "TOOLS-STRUCTURED-CORE"
CHAT, TEXT, TOKENS = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
TIGHT = {"disable_any_whitespace": True}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2, 3]}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 400, "seed": 1}


def fits(text: str) -> bool:
    data = json.loads(text)
    return list(data) == ["ok", "n"] and isinstance(data["ok"], bool) and data["n"] in (1, 2, 3)


JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<n>",
        "content": {"type": "json_schema", "json_schema": {"type": "integer"}},
        "end": ".",
    },
}
ASKED: list[tuple[dict[str, Any], Any]] = [
    ({"response_format": JSON_SCHEMA}, fits),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}}, fits),
    ({"response_format": TAG}, lambda text: text.startswith("<n>") and text.endswith(".")),
    ({"structured_outputs": {"json": SCHEMA}}, fits),
    ({"structured_outputs": {"json": json.dumps(SCHEMA), **TIGHT}}, lambda text: fits(text) and " " not in text),
    ({"structured_outputs": {"regex": "[ab]{3}", "json": None}}, lambda text: len(text) == 3),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, lambda text: text in ("yes", "no")),
    ({"structured_outputs": {"grammar": 'root ::= "x" | "y"'}}, lambda text: text in ("x", "y")),
    ({"structured_outputs": {"json_object": False, "regex": "z"}}, lambda text: text == "z"),
]  # fmt: skip


@pytest.mark.row(CORE, "output is forced to fit, over HTTP")
@pytest.mark.parametrize(("asked", "holds"), ASKED, ids=lambda value: "" if callable(value) else str(value)[:60])
async def test_chat(asked: dict[str, Any], holds: Any) -> None:
    async with in_process(letters) as (client, _):
        reply = await client.post(CHAT, json={**HI, **asked})
        streamed = await client.post(CHAT, json={**HI, **asked, "stream": True})
    choice = reply.json()["choices"][0]
    assert choice["finish_reason"] == "stop", reply.text
    assert holds(choice["message"]["content"])
    chunks = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert (
        "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
        == choice["message"]["content"]
    )


async def test_any_json_object_and_any_text() -> None:
    async with in_process(letters) as (client, _):
        some = await client.post(CHAT, json={**HI, "response_format": {"type": "json_object"}, "n": 4})
        plain = await client.post(
            CHAT, json={**HI, "response_format": {"type": "text"}, "structured_outputs": {"json": None}}
        )
    ended = [c["message"]["content"] for c in some.json()["choices"] if c["finish_reason"] == "stop"]
    assert ended and all(isinstance(json.loads(text), dict) for text in ended)
    assert len(plain.json()["choices"][0]["message"]["content"]) == 400


async def test_the_other_routes() -> None:
    async with in_process(letters) as (client, _):
        text = await client.post(
            TEXT, json={"prompt": ["a", "b"], "max_tokens": 9, "best_of": 3, "structured_outputs": {"regex": "[xy]{4}"}}
        )
        ids = await client.post(
            TOKENS,
            json={
                "token_ids": [1],
                "sampling_params": {"structured_outputs": {"choice": ["q"]}},
                "output_mode": "text",
            },
        )
        sglang = await client.post(
            "/generate",
            json={"text": "a", "sampling_params": {"json_schema": json.dumps(SCHEMA), "max_new_tokens": 200}},
        )
        regex = await client.post("/generate", json={"text": "a", "sampling_params": {"regex": "zz"}})
        ollama = await client.post(
            "/api/chat", json={"model": "m", "messages": HI["messages"], "stream": False, "format": SCHEMA}
        )
        rendered = await client.post(f"{CHAT}/render", json={**HI, "response_format": JSON_SCHEMA})
        round_trip = await client.post(TOKENS, json={**rendered.json(), "output_mode": "text"})
    assert all(len(choice["text"]) == 4 and set(choice["text"]) <= set("xy") for choice in text.json()["choices"])
    assert ids.json()["choices"][0]["text"] == "q"
    assert fits(sglang.json()["text"])
    assert regex.json()["text"] == "zz"
    if ollama.status_code != 404:
        assert fits(ollama.json()["message"]["content"]), ollama.text
    assert rendered.json()["sampling_params"]["structured_outputs"] == {"json": SCHEMA}
    assert fits(round_trip.json()["choices"][0]["text"])


NOT: dict[str, Any] = {"not": {}}
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": NOT}}}, "response_format", "not"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format", "schema"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "shema": {}}}}, "response_format", "shema"),
    (CHAT, {"response_format": {"type": "xml"}}, "response_format", "xml"),
    (CHAT, {"response_format": {"type": "json_object", "schema": {}}}, "response_format", "schema"),
    (CHAT, {"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed"),
    (CHAT, {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one"),
    (CHAT, {"structured_outputs": {"backend": "xgrammar", "regex": "a"}}, "structured_outputs", "backend"),
    (CHAT, {"structured_outputs": {"json": "{"}}, "structured_outputs", "JSON"),
    (CHAT, {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs", "both"),
    (CHAT, {"guided_regex": "a"}, "guided_regex", "structured_outputs"),
    (CHAT, {"thinking_token_budget": 5}, "thinking_token_budget", "reasoning"),
    (TEXT, {"structured_outputs": {"grammar": "x"}}, "structured_outputs", "grammar"),
    (TOKENS, {"sampling_params": {"structured_outputs": {"regex": "("}}}, "sampling_params.structured_outputs", "unclosed"),
    (TOKENS, {"sampling_params": {"guided_decoding": {"regex": "a"}}}, "sampling_params.guided_decoding", "structured_outputs"),
    ("/generate", {"sampling_params": {"regex": "("}}, "sampling_params.json_schema", "unclosed"),
]  # fmt: skip
BASE = {CHAT: HI, TEXT: {"prompt": "a"}, TOKENS: {"token_ids": [1]}, "/generate": {"text": "a"}}


@pytest.mark.row(CORE, "a bad grammar is a 400 for that request alone")
@pytest.mark.parametrize(("path", "asked", "field", "word"), REFUSED, ids=lambda value: str(value)[:60])
async def test_refusals_name_the_clients_field(path: str, asked: dict[str, Any], field: str, word: str) -> None:
    async with in_process(letters) as (client, _):
        for stream in (False, True):
            reply = await client.post(path, json={**BASE[path], **asked, "stream": stream})
            assert reply.status_code == 400, reply.text
            error = reply.json()["error"]
            assert error["param"] == field
            assert word in error["message"]
        good = await client.post(CHAT, json=HI)
    assert len(good.json()["choices"][0]["message"]["content"]) == 400
