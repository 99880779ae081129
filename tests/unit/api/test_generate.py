"""Token ids in, token ids out, in vLLM's shape: replies, chunks, what is refused, and engines without a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx2
import pytest

from api_server import MODEL, events, in_process
from infer.config.engine import EngineConfig
from infer.engine.step import SamplingSpec
from infer.errors import ConfigError
from infer.testing.fake_engine import EOS, scripted
from infer.testing.fake_executor import NextToken, hashed_token

pytestmark = pytest.mark.anyio
GENERATE = "/inference/v1/generate"
TOKENS_ONLY = EngineConfig(model={"skip_tokenizer": True}, cache={"num_blocks": 4096})


def ask(prompt: Sequence[int] = (7, 8, 9), /, **more: Any) -> dict[str, Any]:
    sampling = {"max_tokens": 6, "ignore_eos": True} | more.pop("sampling_params", {})
    return {"token_ids": list(prompt), "sampling_params": sampling, **more}


def chunks(reply: httpx2.Response) -> list[dict[str, Any]]:
    data = events(reply.text)
    assert data[-1] == "[DONE]"
    return [json.loads(event) for event in data[:-1]]


def traced(drawn: list[int], next_token: NextToken | None = None) -> NextToken:
    """Notes every sampled id, as the worker draws it."""
    draw = next_token or hashed_token(250)

    def note(token_ids: Sequence[int], sampling: SamplingSpec) -> int:
        drawn.append(draw(token_ids, sampling))
        return drawn[-1]

    return note


@pytest.mark.row("X-TITO", "ids returned equal ids sampled in the step trace")
async def test_the_ids_returned_are_those_that_were_sampled() -> None:
    drawn: list[int] = []
    async with in_process(traced(drawn), config=TOKENS_ONLY) as (client, _):
        reply = await client.post(GENERATE, json=ask(request_id="mine", return_token_ids=True, model=MODEL))
        assert reply.status_code == 200
        body = reply.json()
        whole = list(drawn)
        drawn.clear()
        streamed = chunks(await client.post(GENERATE, json=ask(stream=True)))
    [choice] = body["choices"]
    assert choice["token_ids"] == whole and len(whole) == 6
    assert (choice["finish_reason"], choice["stop_reason"], choice["index"]) == ("length", None, 0)
    assert "text" not in choice
    assert body["request_id"] == "mine" and body["prompt_token_ids"] == [7, 8, 9]
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 6,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert body["kv_transfer_params"] is None and body["prompt_logprobs"] is None
    assert [token for chunk in streamed for token in chunk["choices"][0]["token_ids"]] == drawn
    assert [chunk["choices"][0]["finish_reason"] for chunk in streamed][-1] == "length"


async def test_logprobs_name_ids_and_put_the_sampled_token_first() -> None:
    asked = ask(sampling_params={"logprobs": 1, "prompt_logprobs": 0})
    async with in_process() as (client, _):
        body = (await client.post(GENERATE, json=asked)).json()
    [choice] = body["choices"]
    content = choice["logprobs"]["content"]
    assert [entry["token_id"] for entry in content] == choice["token_ids"]
    assert all(entry["token"] == f"token_id:{entry['token_id']}" for entry in content)
    assert all(entry["logprob"] == -1.0 and entry["rank"] == 1 for entry in content)
    assert body["prompt_logprobs"] == [
        None,
        {"8": {"logprob": -1.0, "rank": 1, "decoded_token": None}},
        {"9": {"logprob": -1.0, "rank": 1, "decoded_token": None}},
    ]


async def test_several_choices_and_the_text_of_them() -> None:
    async with in_process(scripted("ok")) as (client, _):
        asked = {"token_ids": [65], "sampling_params": {"n": 2, "temperature": 0}, "output_mode": "text"}
        body = (await client.post(GENERATE, json=asked)).json()
    assert [(choice["index"], choice["text"], choice["finish_reason"]) for choice in body["choices"]] == [
        (0, "ok", "stop"),
        (1, "ok", "stop"),
    ]
    assert body["choices"][0]["token_ids"] == [*b"ok", EOS]


async def test_usage_in_streams() -> None:
    async with in_process() as (client, _):
        asked = ask(stream=True, stream_options={"include_usage": True})
        *_, last = chunks(await client.post(GENERATE, json=asked))
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 6
    assert last["metrics"]["num_preemptions"] == 0


@pytest.mark.row("SERVE-RESPONSE-METRICS", "queue + prefill + decode equals end-to-end within 1 ms")
async def test_a_reply_tells_where_its_time_went() -> None:
    async with in_process(latency=0.002) as (client, _):
        metrics = (await client.post(GENERATE, json=ask())).json()["metrics"]
    parts = metrics["queue_time_ms"] + metrics["time_to_first_token_ms"] + metrics["generation_time_ms"]
    assert abs(parts - metrics["total_time_ms"]) < 1.0
    assert min(metrics["queue_time_ms"], metrics["time_to_first_token_ms"], metrics["generation_time_ms"]) > 0
    assert metrics["mean_itl_ms"] == pytest.approx(metrics["generation_time_ms"] / 5)


@pytest.mark.parametrize(
    ("more", "parameter"),
    [
        ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
        ({"features": {"mm_hashes": {}}}, "features"),
        ({"lora_name": "x"}, "lora_name"),
        ({"sampling_params": {"routed_experts_prompt_start": 4}}, "sampling_params.routed_experts_prompt_start"),
        ({"sampling_params": {"extra_args": {"kv_transfer_params": {"a": 1}}}}, "sampling_params.extra_args"),
        ({"sampling_params": {"max_token": 5}}, "max_token"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [900]}, "token_ids"),
        ({"token_ids": [1, -2]}, "token_ids"),
        ({"stray": 1}, "stray"),
        ({"model": "other"}, "model"),
    ],
)
async def test_what_is_refused_is_named(more: dict[str, Any], parameter: str) -> None:
    async with in_process() as (client, server):
        reply = await client.post(GENERATE, json=ask() | more)
        assert server.engine.statistics().steps == 0
    assert reply.status_code in (400, 404)
    assert reply.json()["error"]["param"] == parameter


async def test_nothing_that_asks_for_nothing_is_refused() -> None:
    quiet = {"kv_transfer_params": None, "features": None, "prompt_text": "as rendered", "stream_options": None}
    sampling = {"detokenize": False, "flat_logprobs": True, "routed_experts_prompt_start": None, "top_k": -1}
    async with in_process() as (client, _):
        reply = await client.post(GENERATE, json=ask(**quiet, sampling_params=sampling))
        assert reply.status_code == 200
        assert "x-infer-notice" not in reply.headers
        noted = await client.post(GENERATE, json=ask(sampling_params={"extra_args": {"a": 1}}))
    assert "extra_args" in noted.headers["x-infer-notice"]


# -- without a tokenizer -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "parameter"),
    [
        ("/v1/completions", {"prompt": "text"}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, "messages"),
        ("/generate", {"text": "text"}, "prompt"),
        ("/tokenize", {"prompt": "text"}, "prompt"),
        ("/detokenize", {"tokens": [1]}, "token_ids"),
        (GENERATE, ask(sampling_params={"stop": ["x"]}), "sampling_params.stop"),
        (GENERATE, ask(sampling_params={"bad_words": ["x"]}), "sampling_params.bad_words"),
        (GENERATE, ask(output_mode="text"), "output_mode"),
    ],
)
async def test_without_a_tokenizer_text_is_refused(path: str, body: dict[str, Any], parameter: str) -> None:
    async with in_process(config=TOKENS_ONLY) as (client, _):
        reply = await client.post(path, json=body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == parameter


async def test_completions_of_ids_work_without_a_tokenizer() -> None:
    drawn: list[int] = []
    async with in_process(traced(drawn), config=TOKENS_ONLY) as (client, _):
        asked = {"prompt": [1, 2], "max_tokens": 3, "return_token_ids": True, "ignore_eos": True}
        body = (await client.post("/v1/completions", json=asked)).json()
    assert body["choices"][0]["token_ids"] == drawn and body["choices"][0]["text"] == ""


def test_a_tokenizer_cannot_be_named_and_skipped() -> None:
    with pytest.raises(ConfigError, match=r"model\.tokenizer and model\.skip_tokenizer=True"):
        EngineConfig(model={"skip_tokenizer": True, "tokenizer": "somewhere"})
