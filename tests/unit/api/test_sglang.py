"""SGLang's `/generate`: single and batch, text and ids, log-probabilities, growing streams, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from api_server import events, in_process, until
from infer.config.engine import EngineConfig
from infer.engine.step import SamplingSpec
from infer.testing.fake_engine import EOS, scripted
from infer.testing.fake_executor import hashed_token

pytestmark = pytest.mark.anyio
TOKENS_ONLY = EngineConfig(model={"skip_tokenizer": True}, cache={"num_blocks": 4096})
GREEDY = {"temperature": 0, "max_new_tokens": 8}


def ask(**more: Any) -> dict[str, Any]:
    return {"text": "hi", "sampling_params": GREEDY | more.pop("sampling_params", {}), **more}


async def test_a_single_prompt() -> None:
    async with in_process(scripted("ok")) as (client, _):
        body = (await client.post("/generate", json=ask(rid="mine"))).json()
    assert body["text"] == "ok"
    assert body["output_ids"] == [*b"ok", EOS]
    meta = body["meta_info"]
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "stop", "matched": EOS}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (2, 3, 0)
    assert meta["weight_version"] == "default"
    assert meta["queue_time"] + meta["prefill_time"] + meta["decode_time"] == pytest.approx(
        meta["e2e_latency"], abs=1e-3
    )
    assert "output_token_logprobs" not in meta


async def test_why_it_ended() -> None:
    async with in_process(scripted("one two")) as (client, _):
        cut = (await client.post("/generate", json=ask(sampling_params={"max_new_tokens": 3}))).json()
        stopped = (await client.post("/generate", json=ask(sampling_params={"stop": [" t"]}))).json()
        kept = (await client.post("/generate", json=ask(sampling_params={"stop": " t", "no_stop_trim": True}))).json()
        by_id = (await client.post("/generate", json=ask(sampling_params={"stop_token_ids": [ord("e")]}))).json()
    assert cut["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": " t"}
    assert (stopped["text"], kept["text"], by_id["text"]) == ("one", "one t", "on")
    assert by_id["meta_info"]["finish_reason"] == {"type": "stop", "matched": ord("e")}


async def test_a_request_ended_from_outside_is_an_abort_with_what_it_has() -> None:
    async with in_process(hashed_token(200), latency=0.005) as (client, server), anyio.create_task_group() as tasks:

        async def abort() -> None:
            await until(lambda: bool(server.engine.request_ids))
            await anyio.sleep(0.03)
            assert server.engine.abort("mine")

        tasks.start_soon(abort)
        asked = ask(rid="mine", sampling_params={"max_new_tokens": 1000, "ignore_eos": True})
        body = (await client.post("/generate", json=asked)).json()
    assert body["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(body["output_ids"]) < 1000


async def test_logprobs_of_output_and_of_the_prompt_from_a_position_on() -> None:
    async with in_process(scripted("ok")) as (client, _):
        asked = ask(input_ids=[5, 6, 7, 8], return_logprob=True, logprob_start_len=1)
        del asked["text"]
        with_ids = (await client.post("/generate", json=asked)).json()["meta_info"]
        asked |= {"return_text_in_logprobs": True, "logprob_start_len": -1}
        with_text = (await client.post("/generate", json=asked)).json()["meta_info"]
    assert with_ids["output_token_logprobs"] == [[-1.0, ord("o"), None], [-1.0, ord("k"), None], [-1.0, EOS, None]]
    assert with_ids["input_token_logprobs"] == [[None, 6, None], [-1.0, 7, None], [-1.0, 8, None]]
    assert with_ids["prompt_tokens"] == 1 + len(with_ids["input_token_logprobs"])
    assert [entry[2] for entry in with_text["output_token_logprobs"]] == ["o", "k", ""]
    assert with_text["input_token_logprobs"] == []


async def test_a_batch_answers_in_order_each_with_its_own_settings() -> None:
    def echo(token_ids: Sequence[int], sampling: SamplingSpec) -> int:
        return token_ids[0]

    async with in_process(echo) as (client, _):
        asked = {
            "input_ids": [[1], [2], [3]],
            "sampling_params": [{"max_new_tokens": count} for count in (1, 2, 3)],
            "rid": "group",
        }
        replies = (await client.post("/generate", json=asked)).json()
        named = (await client.post("/generate", json=asked | {"rid": ["a", "b", "c"]})).json()
        several = (
            await client.post("/generate", json={"input_ids": [9], "sampling_params": {"n": 2, "max_new_tokens": 1}})
        ).json()
    assert [reply["output_ids"] for reply in replies] == [[1], [2, 2], [3, 3, 3]]
    assert [reply["meta_info"]["id"] for reply in replies] == ["group_0", "group_1", "group_2"]
    assert [reply["meta_info"]["id"] for reply in named] == ["a", "b", "c"]
    assert [reply["output_ids"] for reply in several] == [[9], [9]]


async def test_a_stream_grows_and_ends_as_the_whole_reply() -> None:
    async with in_process(scripted("ok")) as (client, _):
        whole = (await client.post("/generate", json=ask(return_logprob=True))).json()
        data = events((await client.post("/generate", json=ask(return_logprob=True, stream=True))).text)
    assert data[-1] == "[DONE]"
    grown = [json.loads(event) for event in data[:-1]]
    texts = [part["text"] for part in grown]
    assert len(texts) > 1 and all("ok".startswith(text) for text in texts) and texts == sorted(texts)
    assert all(part["meta_info"]["finish_reason"] is None for part in grown[:-1])
    last = grown[-1]
    assert last["output_ids"] == whole["output_ids"]
    for name in ("finish_reason", "output_token_logprobs", "completion_tokens", "prompt_tokens"):
        assert last["meta_info"][name] == whole["meta_info"][name]


async def test_the_default_length_is_sglangs_and_null_is_none() -> None:
    async with in_process(hashed_token(200), max_position=300) as (client, _):
        asked = {"input_ids": [1, 2], "sampling_params": {"ignore_eos": True}}
        default = (await client.post("/generate", json=asked)).json()
        asked["sampling_params"]["max_new_tokens"] = None
        full = (await client.post("/generate", json=asked)).json()
    assert len(default["output_ids"]) == 128
    assert len(full["output_ids"]) == 298


async def test_without_a_tokenizer_there_is_no_text() -> None:
    async with in_process(config=TOKENS_ONLY) as (client, _):
        body = (await client.post("/generate", json={"input_ids": [1, 2], "sampling_params": GREEDY})).json()
        refused = await client.post("/generate", json={"input_ids": [1], "return_text_in_logprobs": True})
    assert set(body) == {"output_ids", "meta_info"}
    assert refused.json()["error"]["param"] == "return_text_in_logprobs"


@pytest.mark.parametrize(
    ("more", "parameter"),
    [
        ({"return_routed_experts": True}, "return_routed_experts"),
        ({"return_hidden_states": True}, "return_hidden_states"),
        ({"lora_path": "adapter"}, "lora_path"),
        ({"image_data": "data:..."}, "image_data"),
        ({"input_ids": [1]}, "input_ids"),
        ({"text": None}, "input_ids"),
        ({"sampling_params": {"stop_regex": "a+"}}, "sampling_params.stop_regex"),
        ({"sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
        ({"sampling_params": {"sampling_seed": -4}}, "sampling_params.sampling_seed"),
        ({"return_logprobs": True}, "return_logprobs"),
    ],
)
async def test_what_is_refused_is_named(more: dict[str, Any], parameter: str) -> None:
    async with in_process() as (client, server):
        reply = await client.post("/generate", json=ask() | more)
        assert server.engine.statistics().steps == 0
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == parameter


async def test_logprobs_at_another_temperature_come_with_a_notice() -> None:
    async with in_process() as (client, _):
        reply = await client.post("/generate", json=ask(return_logprob=True, sampling_params={"temperature": 0.5}))
    assert "temperature 1" in reply.headers["x-infer-notice"]


async def test_model_facts_and_health() -> None:
    async with in_process() as (client, _):
        facts = (await client.get("/model_info")).json()
        healthy = await client.get("/health_generate")
    assert facts["is_generation"] is True and facts["max_model_len"] == 2048
    assert healthy.status_code == 200
