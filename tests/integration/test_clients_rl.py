"""What reinforcement-learning clients do, against real models: token ids in and out, render and derender, tokenizing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import ollama
import pytest

from infer import Engine, EngineConfig
from infer.api import build_app, build_context
from integration.engine_support import CHAT_TEMPLATE, LLAMA, engine_config, write_checkpoint
from integration.live_server import live_server

TEXTS = ["The dog barks", " at the\n\nfox", "wörld ✓ \u00bd", "<s>word</s>"]
MESSAGES = [{"role": "user", "content": "Where is the fox?"}, {"role": "assistant", "content": "There."}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("rl") / "tiny", LLAMA)


@asynccontextmanager
async def served(config: EngineConfig) -> AsyncIterator[httpx2.AsyncClient]:
    async with Engine(config) as engine:
        transport = httpx2.ASGITransport(build_app(build_context(engine)))
        async with httpx2.AsyncClient(transport=transport, base_url="http://test", timeout=120) as client:
            yield client


async def post(client: httpx2.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    reply = await client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.anyio
@pytest.mark.row("SERVE-UTILITY-ENDPOINTS", "ids equal HF tokenizer output in raw and chat form")
async def test_tokenize_gives_the_ids_of_the_hugging_face_tokenizer(checkpoint: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    oracle = PreTrainedTokenizerFast(tokenizer_file=str(checkpoint / "tokenizer.json"), chat_template=CHAT_TEMPLATE)
    chat = oracle.apply_chat_template(MESSAGES[:1], add_generation_prompt=True, return_dict=False)
    async with served(engine_config(checkpoint)) as client:
        for text in TEXTS:
            told = await post(client, "/tokenize", {"prompt": text, "return_token_strs": True})
            assert told["tokens"] == oracle.encode(text) and told["count"] == len(told["tokens"])
            assert (await post(client, "/detokenize", {"tokens": told["tokens"]}))["prompt"] == text
        told = await post(client, "/tokenize", {"messages": MESSAGES[:1]})
        assert told["tokens"] == chat and told["max_model_len"] == 640


@pytest.mark.anyio
async def test_three_dialects_sample_the_same_ids(checkpoint: Path) -> None:
    """The token routes of vLLM and SGLang and /v1/completions are one engine: same seed, same ids and log-probabilities."""
    prompt = [5, 17, 200, 31]
    vllm = {
        "token_ids": prompt,
        "cache_salt": "policy-7",
        "sampling_params": {
            **{"max_tokens": 12, "temperature": 1.0, "seed": 11, "logprobs": 1, "skip_special_tokens": False},
            **{"ignore_eos": True, "detokenize": False, "stop_token_ids": []},
        },
    }
    sglang = {
        "input_ids": prompt,
        "return_logprob": True,
        "sampling_params": {
            **{"max_new_tokens": 12, "temperature": 1.0, "sampling_seed": 11, "ignore_eos": True, "top_k": -1},
            **{"skip_special_tokens": False, "no_stop_trim": True, "spaces_between_special_tokens": False},
        },
    }
    openai = {
        **{"prompt": prompt, "max_tokens": 12, "temperature": 1.0, "seed": 11, "ignore_eos": True},
        **{"logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True},
    }
    async with served(engine_config(checkpoint, cache={"prefix_caching": False})) as client:
        [first] = (await post(client, "/inference/v1/generate", vllm))["choices"]
        second = await post(client, "/generate", sglang)
        [third] = (await post(client, "/v1/completions", openai))["choices"]
    ids = first["token_ids"]
    assert len(ids) == 12 and second["output_ids"] == third["token_ids"] == ids
    content = first["logprobs"]["content"]
    logprobs = [entry["logprob"] for entry in content]
    assert [int(entry["token"].removeprefix("token_id:")) for entry in content] == ids
    assert [entry["top_logprobs"][0]["token_id"] for entry in content] == ids, "the sampled token comes first"
    assert [entry[:2] for entry in second["meta_info"]["output_token_logprobs"]] == [
        list(pair) for pair in zip(logprobs, ids, strict=True)
    ]
    assert third["logprobs"]["token_logprobs"] == logprobs
    assert third["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in ids]


@pytest.mark.anyio
async def test_special_tokens_are_shown_to_who_asks(checkpoint: Path) -> None:
    """Token 2 is </s>; trainers that compare text with ids want it written."""
    sampling = {"max_tokens": 3, "allowed_token_ids": [2], "ignore_eos": True}
    async with served(engine_config(checkpoint)) as client:
        for skip, text in ((True, ""), (False, "</s></s></s>")):
            asked = {"prompt": [5, 6], "skip_special_tokens": skip, **sampling}
            assert (await post(client, "/v1/completions", asked))["choices"][0]["text"] == text
            asked = {"messages": MESSAGES[:1], "skip_special_tokens": skip, **sampling}
            [choice] = (await post(client, "/v1/chat/completions", asked))["choices"]
            assert choice["message"]["content"] == text


@pytest.mark.anyio
async def test_prompt_logprobs_agree_across_the_dialects(checkpoint: Path) -> None:
    prompt = [5, 17, 200, 31, 44]
    async with served(engine_config(checkpoint)) as client:
        vllm = {"token_ids": prompt, "sampling_params": {"max_tokens": 1, "prompt_logprobs": 2}}
        told = (await post(client, "/inference/v1/generate", vllm))["prompt_logprobs"]
        sglang = {"input_ids": prompt, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
        meta = (await post(client, "/generate", sglang | {"sampling_params": {"max_new_tokens": 1}}))["meta_info"]
    assert told[0] is None and [next(iter(entry)) for entry in told[1:]] == [str(token_id) for token_id in prompt[1:]]
    own = [entry[str(token_id)] for entry, token_id in zip(told[1:], prompt[1:], strict=True)]
    assert [triple[0] for triple in meta["input_token_logprobs"]] == [None, *(entry["logprob"] for entry in own)]
    assert [triple[1] for triple in meta["input_token_logprobs"]] == prompt
    for entry, top in zip(told[1:], meta["input_top_logprobs"][1:], strict=True):
        best = sorted(entry.items(), key=lambda item: item[1]["rank"])[:2]
        assert [(int(key), value["logprob"]) for key, value in best] == [(top_id, value) for value, top_id, _ in top]


@pytest.mark.anyio
@pytest.mark.row("X-RENDER", "output of render + generate + derender equals the chat endpoint byte for byte")
async def test_render_generate_derender_with_a_real_model(checkpoint: Path) -> None:
    asked = {
        **{"messages": MESSAGES, "seed": 3, "n": 2, "max_tokens": 24, "logprobs": True, "top_logprobs": 4},
        **{"prompt_logprobs": 2, "stop": ["e", "fox"], "return_token_ids": True},
    }
    async with served(engine_config(checkpoint, cache={"prefix_caching": False})) as client:
        named = {"headers": {"x-request-id": "same"}}
        whole = (await client.post("/v1/chat/completions", json=asked, **named)).json()
        rendered = (await client.post("/v1/chat/completions/render", json=asked, **named)).json()
        answered = await post(client, "/inference/v1/generate", rendered)
        request = {"generate_response": answered, "chat_request": asked, "prompt_token_ids": rendered["token_ids"]}
        halves = await client.post("/v1/chat/completions/derender", json=request)
    assert halves.status_code == 200, halves.text
    assert halves.text.replace(f'"created":{answered["created"]}', f'"created":{whole["created"]}') == (
        httpx2.Response(200, json=whole).text
    )


_WITHOUT = """
import sys, anyio
from infer import Engine, EngineConfig, SamplingParams
async def main():
    config = EngineConfig(model={"ref": sys.argv[1], "skip_tokenizer": True}, cache={"num_blocks": 64})
    async with Engine(config) as engine:
        done = await engine.generate([1, 2, 3], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
    return len(done.token_ids), done.text
print(anyio.run(main), sorted(name for name in sys.modules if name.partition(".")[0] in ("tokenizers", "jinja2")))
"""


@pytest.mark.row("X-TITO", "no tokenizer is loaded in tokens-only mode (module list check)")
def test_no_tokenizer_is_loaded(checkpoint: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT, str(checkpoint)], capture_output=True, text=True, check=False, timeout=200
    )
    assert done.stdout.strip() == "(4, '') []", done.stderr


@pytest.mark.model
@pytest.mark.row("X-OLLAMA", "the `ollama` Python client runs list, show, chat, generate")
def test_ollama_and_the_small_model(smollm2_gguf: Path) -> None:
    with live_server(Engine, model={"ref": str(smollm2_gguf), "dtype": "float32"}, cache={"num_blocks": 128}) as server:
        client = ollama.Client(host=server.url)
        [model] = client.list().models
        assert model.model is not None and model.size and model.size > 10**7
        asked = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
        options = {"temperature": 0, "num_predict": 9}
        whole = client.chat(model.model, asked, options=options)
        streamed = client.chat(model.model, asked, options=options, stream=True)
        text = "".join(part.message.content or "" for part in streamed)
        assert client.generate(model.model, asked[0]["content"], options=options).response == whole.message.content
    assert whole.message.content is not None and "Paris" in whole.message.content
    assert text == whole.message.content
