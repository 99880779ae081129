"""Tokenize and detokenize, server facts, cache reset and aborts over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anyio
import pytest
from pydantic import BaseModel

from api_server import MODEL, in_process, until
from infer.api.utility import public_config
from infer.config.engine import SECRET_SETTINGS, EngineConfig
from infer.testing.fake_executor import hashed_token

pytestmark = pytest.mark.anyio
ADMIN = {"admin": True}


async def test_a_prompt_and_a_conversation_become_ids_and_come_back() -> None:
    messages = [{"role": "user", "content": "hé"}]
    async with in_process() as (client, _):
        raw = (await client.post("/tokenize", json={"prompt": "hé", "return_token_strs": True})).json()
        chat = (await client.post("/tokenize", json={"model": MODEL, "messages": messages})).json()
        closed = (await client.post("/tokenize", json={"messages": messages, "add_generation_prompt": False})).json()
        back = (await client.post("/detokenize", json={"tokens": chat["tokens"]})).json()
    assert raw == {
        "count": 3,
        "max_model_len": 2048,
        "tokens": list("hé".encode()),
        "token_strs": ["h", "\ufffd", "\ufffd"],
    }
    assert back == {"prompt": "<user>hé\n<assistant>"}
    assert chat["tokens"] == list("<user>hé\n<assistant>".encode()) and chat["token_strs"] is None
    assert closed["tokens"] == list("<user>hé\n".encode())


@pytest.mark.parametrize(
    ("path", "body", "parameter"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": "a", "chat_template": "{{ x }}"}, "chat_template"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("/detokenize", {"tokens": [9999]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
async def test_what_is_refused_is_named(path: str, body: dict[str, Any], parameter: str) -> None:
    async with in_process() as (client, _):
        reply = await client.post(path, json=body)
    assert reply.status_code in (400, 404)
    assert reply.json()["error"]["param"] == parameter


async def test_facts_of_the_tokenizer_are_shown_when_the_operator_says_so() -> None:
    async with in_process() as (client, _):
        assert (await client.get("/tokenizer_info")).status_code == 404
    async with in_process(settings={"tokenizer_info": True}) as (client, _):
        facts = (await client.get("/tokenizer_info")).json()
    assert facts["tokenizer_class"] == "ByteTokenizer" and facts["vocab_size"] == 258
    assert "message['content']" in facts["chat_template"]


def secret_fields(model: type[BaseModel], above: str = "") -> Iterator[str]:
    """Settings that are declared as never shown."""
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from secret_fields(inner, f"{above}{name}.")
        elif not field.repr or "SecretStr" in str(inner):
            yield above + name


def test_every_secret_setting_is_one_that_messages_and_replies_leave_out() -> None:
    assert set(secret_fields(EngineConfig)) == set(SECRET_SETTINGS)


def test_the_public_configuration_has_no_options_of_plugins() -> None:
    """They may hold passwords."""
    config = EngineConfig(
        api={"api_keys": ("S3CRET",), "endpoints": ("one",), "endpoint_options": {"one": {"token": "S3CRET"}}},
        plugins={"stat_loggers": ("log",), "stat_logger_options": {"log": {"password": "S3CRET"}}},
        kv_connector={"name": "directory", "options": {"key": "S3CRET"}},
        artifacts={
            "storage_profiles": {
                "here": {
                    "url": "memory://x",
                    "storage_options": {"secret": "S3CRET"},
                    "allowed_prefixes": ["a"],
                    "create_only": True,
                }
            }
        },
    )
    told = public_config(config)
    assert "S3CRET" not in json.dumps(told) and "S3CRET" not in repr(config)
    assert told["api"]["endpoints"] == ["one"] and told["kv_connector"]["name"] == "directory"
    assert told["artifacts"]["storage_profiles"]["here"]["url"] == "memory://x"


@pytest.mark.row("SERVE-UTILITY-ENDPOINTS", "server_info round-trips into the same config")
async def test_server_info_reads_back_as_the_same_configuration() -> None:
    config = EngineConfig(
        model={"ref": "org/name", "dtype": "float32"},
        scheduler={"max_num_seqs": 7, "policy": "priority"},
        cache={"num_blocks": 77, "radix_cache": True},
        plugins={"block": ("a", "b")},
        api={"api_keys": ("secret-1", "secret-2"), "cors_origins": ("https://a.example",), "admin": True},
    )
    async with in_process(config=config, settings=ADMIN) as (client, _):
        reply = await client.get("/server_info")
    assert "secret" not in reply.text
    asked = reply.json()["config"]
    again = EngineConfig(**asked)
    assert again == config.model_copy(update={"api": config.api.model_copy(update={"api_keys": ()})})
    assert again.api.cors_origins == config.api.cors_origins and again.plugins == config.plugins
    assert reply.json()["resolved"]["scheduler"]["max_num_seqs"] == 7


async def test_acts_on_the_whole_server_need_the_setting() -> None:
    async with in_process() as (client, _):
        for method, path in (("GET", "/server_info"), ("POST", "/reset_prefix_cache"), ("POST", "/abort_requests")):
            assert (await client.request(method, path)).status_code == 404
        version = (await client.get("/version")).json()
    assert version["version"]


@pytest.mark.row("SERVE-UTILITY-ENDPOINTS", "reset makes the next identical prompt report 0 cached tokens")
async def test_a_reset_forgets_cached_prompts() -> None:
    asked = {"model": MODEL, "prompt": "x" * 64, "max_tokens": 1}

    async def cached() -> int:
        usage = (await client.post("/v1/completions", json=asked)).json()["usage"]
        count: int = usage["prompt_tokens_details"]["cached_tokens"]
        return count

    async with in_process(settings=ADMIN) as (client, _):
        assert await cached() == 0
        assert await cached() > 0
        assert (await client.post("/reset_prefix_cache")).json() == {"success": True}
        assert await cached() == 0


async def test_a_reset_is_refused_while_blocks_are_held_unless_their_holders_start_over() -> None:
    asked = {"token_ids": [1] * 40, "sampling_params": {"max_tokens": 60, "ignore_eos": True}}
    async with (
        in_process(hashed_token(200), settings=ADMIN, latency=0.005) as (client, server),
        anyio.create_task_group() as tasks,
    ):
        answers: list[Any] = []

        async def run() -> None:
            answers.append((await client.post("/inference/v1/generate", json=asked)).json())

        tasks.start_soon(run)
        await until(lambda: server.engine.statistics().running == 1)
        refused = await client.post("/reset_prefix_cache")
        done = await client.post("/reset_prefix_cache", json={"reset_running_requests": True})
    assert refused.status_code == 409 and refused.json()["error"]["code"] == "cache_in_use"
    assert done.json() == {"success": True}
    [answer] = answers
    expected, known = [], [1] * 40
    for _ in range(60):  # what it would have answered alone
        expected.append(hashed_token(200)(known, server.worker.plans[0].admissions[0].sampling))
        known.append(expected[-1])
    assert answer["choices"][0]["token_ids"] == expected
    assert answer["metrics"]["num_preemptions"] == 1


async def test_requests_are_aborted_by_name_or_all() -> None:
    sampling = {"max_tokens": 1500, "ignore_eos": True}
    async with (
        in_process(hashed_token(200), settings=ADMIN, latency=0.005) as (client, server),
        anyio.create_task_group() as tasks,
    ):
        reasons: dict[str, str] = {}

        async def run(name: str) -> None:
            asked = {"token_ids": [1, 2], "request_id": name, "sampling_params": sampling}
            body = (await client.post("/inference/v1/generate", json=asked)).json()
            reasons[name] = body["choices"][0]["finish_reason"]

        for name in ("a", "b", "c"):
            tasks.start_soon(run, name)
        await until(lambda: server.engine.statistics().running == 3)
        first = (await client.post("/abort_requests", json={"request_ids": ["b", "nobody"]})).json()
        await until(lambda: "b" in reasons)
        assert set(reasons) == {"b"}
        rest = (await client.post("/abort_requests")).json()
    assert first == {"aborted": 1, "request_ids": ["b"]}
    assert rest["aborted"] == 2
    assert reasons == {"a": "abort", "b": "abort", "c": "abort"}
