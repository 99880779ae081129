"""Replies say with which seed and which of the checkpoint's defaults they were made, and, where asked, how long it took."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import httpx2
import pytest
from openai.types import Completion as OpenAICompletion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from api_server import events, in_process
from infer.api.app import all_routes, build_context
from infer.api.reply_fields import REPLY_FIELDS, Place
from infer.config.engine import EngineConfig
from infer.config.model import GenerationDefaults
from infer.engine.step import SamplingSpec
from infer.testing.fake_engine import fake_engine
from integration.test_docs_pages import load_tool

pytestmark = pytest.mark.anyio
CHAT, COMPLETIONS, GENERATE, SGLANG = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate", "/generate"
DEFAULTS = {"temperature": 0.25, "top_p": 0.5}
PROMPTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"prompt": "hi"},
}


def letters(token_ids: Sequence[int], sampling: SamplingSpec) -> int:
    """Printable, different from position to position and from seed to seed."""
    return 97 + (len(token_ids) * 7 + sampling.seed) % 26


def served(**more: Any) -> Any:
    return in_process(letters, generation=GenerationDefaults(values=DEFAULTS), **more)


async def chunks(client: httpx2.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    reply = await client.post(path, json={**body, "stream": True})
    assert reply.status_code == 200, reply.text
    return [json.loads(event) for event in events(reply.text)[:-1]]


def told_seeds(streamed: list[dict[str, Any]]) -> dict[int, int]:
    """Each choice says its seed once."""
    found: dict[int, int] = {}
    for choice in (choice for chunk in streamed for choice in chunk["choices"] if "seed" in choice):
        assert choice["index"] not in found
        found[choice["index"]] = choice["seed"]
    return found


def text_of(choice: dict[str, Any]) -> str:
    return choice["text"] if "text" in choice else choice["message"]["content"]


@pytest.mark.parametrize("path", PROMPTS)
async def test_the_seed_that_was_drawn_gives_the_same_answer_again(path: str) -> None:
    asked = {**PROMPTS[path], "max_tokens": 8, "n": 3}
    async with served() as (client, _):
        first = (await client.post(path, json=asked)).json()
        seeds = [choice["seed"] for choice in first["choices"]]
        again = (await client.post(path, json={**asked, "seed": seeds[0]})).json()
        streamed = await chunks(client, path, {**asked, "seed": 2**40})
    assert seeds == [seeds[0], seeds[0] + 1, seeds[0] + 2] and seeds[2] < 2**53  # what a JavaScript number holds
    assert [text_of(choice) for choice in again["choices"]] == [text_of(choice) for choice in first["choices"]]
    assert told_seeds(streamed) == {0: 2**40, 1: 2**40 + 1, 2: 2**40 + 2}


@pytest.mark.parametrize("path", PROMPTS)
async def test_defaults_are_named_where_the_caller_was_silent(path: str) -> None:
    asked = {**PROMPTS[path], "max_tokens": 2}
    async with served() as (client, _):
        silent = (await client.post(path, json=asked)).json()
        partly = (await client.post(path, json={**asked, "temperature": 1.0})).json()
        streamed = await chunks(client, path, asked)
    async with served(config=EngineConfig(model={"use_generation_config": False})) as (client, _):
        unused = (await client.post(path, json=asked)).json()
    assert silent["sampling_defaults"] == DEFAULTS
    assert partly["sampling_defaults"] == {"top_p": 0.5}
    assert unused["sampling_defaults"] == {}
    assert streamed[0]["sampling_defaults"] == DEFAULTS
    assert not any("sampling_defaults" in chunk for chunk in streamed[1:])


async def test_each_prompt_has_a_seed_of_its_own_and_the_best_keep_theirs() -> None:
    async with served() as (client, _):
        both = (await client.post(COMPLETIONS, json={"prompt": ["a", "b"], "max_tokens": 3})).json()
        streamed = await chunks(client, COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 3, "seed": 9})
        best = (await client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 3, "seed": 5, "best_of": 4})).json()
        kept = best["choices"][0]
        alone = (await client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 3, "seed": kept["seed"]})).json()
    assert len({choice["seed"] for choice in both["choices"]}) == 2
    assert told_seeds(streamed) == {0: 9, 1: 9}
    assert kept["seed"] in (5, 6, 7, 8) and alone["choices"][0]["text"] == kept["text"]


async def test_token_routes_say_it_too() -> None:
    ids = [104, 105]
    async with served() as (client, _):
        asked = {"token_ids": ids, "sampling_params": {"max_tokens": 3, "n": 2, "seed": 7, "top_p": 1.0}}
        whole = (await client.post(GENERATE, json=asked)).json()
        streamed = await chunks(client, GENERATE, asked)
        native = {"input_ids": ids, "sampling_params": {"max_new_tokens": 3, "sampling_seed": 7, "n": 2}}
        replies = (await client.post(SGLANG, json=native)).json()
        grown = await chunks(client, SGLANG, native)
    assert [choice["seed"] for choice in whole["choices"]] == [7, 8]
    assert whole["sampling_defaults"] == streamed[0]["sampling_defaults"] == {"temperature": 0.25}
    assert told_seeds(streamed) == {0: 7, 1: 8}
    assert [reply["meta_info"]["sampling_seed"] for reply in replies] == [7, 8]
    assert {chunk["index"]: chunk["meta_info"]["sampling_seed"] for chunk in grown} == {0: 7, 1: 8}
    for told in (*replies, *grown):
        assert told["meta_info"]["sampling_defaults"] == DEFAULTS


@pytest.mark.row("SERVE-RESPONSE-METRICS", "a reply has its times where they are asked for, and they add up")
@pytest.mark.parametrize("path", PROMPTS)
async def test_times_where_they_are_asked_for(path: str) -> None:
    asked = {**PROMPTS[path], "max_tokens": 4, "ignore_eos": True}
    async with served() as (client, _):
        plain = (await client.post(path, json=asked)).json()
        whole = (await client.post(path, json={**asked, "return_metrics": True})).json()
        streamed = await chunks(client, path, {**asked, "return_metrics": True})
        with_usage = await chunks(
            client, path, {**asked, "return_metrics": True, "stream_options": {"include_usage": True}}
        )
        several = await client.post(COMPLETIONS, json={"prompt": ["a", "b"], "return_metrics": True})
    assert "metrics" not in plain
    for metrics in (whole["metrics"], streamed[-1]["metrics"], with_usage[-1]["metrics"], *several.json()["metrics"]):
        parts = metrics["queue_time_ms"] + metrics["time_to_first_token_ms"] + metrics["generation_time_ms"]
        assert parts == pytest.approx(metrics["total_time_ms"], abs=1.0) and parts > 0
        assert metrics["num_preemptions"] == 0
    assert streamed[-1]["choices"] == with_usage[-1]["choices"] == [] and "usage" not in streamed[-1]
    assert with_usage[-1]["usage"]["completion_tokens"] == 4
    assert not any("metrics" in chunk for chunk in (*streamed[:-1], *with_usage[:-1]))


EVERYTHING = {
    "max_tokens": 2,
    "return_token_ids": True,
    "prompt_logprobs": 0,
    "return_metrics": True,
    "stop_token_ids": [1],
}


def extras(model: Any, reply: dict[str, Any]) -> Iterator[tuple[Place, str]]:
    """What the openai client finds beyond its own fields: it must take the reply, and keep them."""
    taken = model.construct(**reply)  # as the client does
    assert taken.to_dict(warnings=False) == reply
    yield from (("reply", name) for name in taken.model_extra or {})
    yield from (("choice", name) for choice in taken.choices for name in choice.model_extra or {})


@pytest.mark.row("X-STRICT-FIELDS", "what replies add to OpenAI's fields is in the generated list, and nothing else is")
@pytest.mark.parametrize("path", PROMPTS)
async def test_the_list_of_reply_fields_is_complete(path: str) -> None:
    """Routed experts need a model that has some: see tests/integration/test_route_scenarios.py."""
    profile = {"url": "memory://reply-facts", "allowed_prefixes": ["runs"], "create_only": True}
    artifacts = {"enable_managed_fsspec": True, "storage_profiles": {"here": profile}}
    target = {"kind": "managed_fsspec", "profile": "here", "object_key": "runs/same"}
    artifact = {"format": "generation_artifact_v1", "contents": []}
    artifact["delivery"] = {"mode": "object_store", "target": target}
    async with served(config=EngineConfig(cache={"num_blocks": 4096}, artifacts=artifacts)) as (client, _):
        asked = {**PROMPTS[path], **EVERYTHING, "generation_artifact": artifact}
        whole = (await client.post(path, json=asked)).json()
        streamed = await chunks(client, path, {**asked, "return_progress": True})
        spelt = {**PROMPTS[path], "nvext": {"generation_artifact": artifact}}
        other = (await client.post(path, json=spelt)).json()
    found: set[tuple[Place, str]] = set()
    for reply in (whole, other):
        found |= set(extras(ChatCompletion if path == CHAT else OpenAICompletion, reply))
    in_chunks = {
        extra
        for chunk in streamed
        for extra in extras(ChatCompletionChunk if path == CHAT else OpenAICompletion, chunk)
    }
    found |= {("choice" if place == "choice" else "first chunk", name) for place, name in in_chunks}
    listed = {field.name: field for field in REPLY_FIELDS[path] if field.asked_by != "return_routed_experts"}
    assert {name for _, name in found} == set(listed)
    for place, name in found:
        places = listed[name].places
        assert place in places or (place == "first chunk" and "last chunk" in places), (place, name)


async def test_the_page_has_every_body_that_a_route_takes() -> None:
    tool = load_tool("field_reference")
    async with fake_engine(letters) as engine:
        settings = engine.config.api.model_copy(update={"admin": True, "tokenizer_info": True})
        routes = all_routes(build_context(engine, settings))
    assert {route.body.name for route in routes if route.body is not None} - {
        body.name for body in tool.BODIES
    } == set()
    assert {field.asked_by for fields in REPLY_FIELDS.values() for field in fields} - {None} <= {
        name for body in tool.BODIES for name in body.known()
    }
