"""Ollama's own Python client against a real server on loopback, over a scripted engine and over the real model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ollama
import pytest

from api_server import HELLO, MODEL, Server, in_thread, on_loopback
from infer import EngineConfig
from infer.testing.fake_engine import CHAT_TEMPLATE, scripted

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with in_thread() as running:
        yield running


@pytest.fixture
def client(server: Server) -> ollama.Client:
    return ollama.Client(host=server.address)


@pytest.mark.row("X-OLLAMA", "the `ollama` Python client runs list, show")
def test_the_model_is_listed_and_shown(client: ollama.Client) -> None:
    listed = client.list()
    assert [model.model for model in listed.models] == [MODEL, "alias"]
    assert listed.models[0].details is not None and listed.models[0].details.format == "safetensors"
    assert listed.models[0].digest and listed.models[0].modified_at is not None
    shown = client.show(MODEL)
    assert shown.template == CHAT_TEMPLATE and shown.capabilities == ["completion", "tools"]
    assert shown.modelinfo is not None and shown.modelinfo["general.context_length"] == 2048
    [loaded, _] = client.ps().models
    assert loaded.model == MODEL and loaded.context_length == 2048


@pytest.mark.row("X-OLLAMA", "the `ollama` Python client runs chat")
def test_a_chat_whole_and_streamed(client: ollama.Client) -> None:
    whole = client.chat(MODEL, MESSAGES, options={"temperature": 0})
    assert whole.message.content == HELLO and whole.message.role == "assistant"
    assert whole.done and whole.done_reason == "stop" and whole.model == MODEL
    assert whole.prompt_eval_count == len("<user>hi\n<assistant>")
    assert whole.eval_count == len(HELLO.encode()) + 1
    assert whole.total_duration and whole.prompt_eval_duration and whole.eval_duration
    assert whole.prompt_eval_duration + whole.eval_duration <= whole.total_duration
    parts = list(client.chat(f"{MODEL}:latest", MESSAGES, stream=True))
    assert "".join(part.message.content or "" for part in parts) == HELLO
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert len(parts) > 2 and parts[-1].eval_count == whole.eval_count


@pytest.mark.row("X-OLLAMA", "the `ollama` Python client runs generate")
def test_generating_with_system_raw_options_and_stop() -> None:
    with in_thread(scripted("one two three")) as server:
        client = ollama.Client(host=server.address)
        whole = client.generate(MODEL, "count", system="Be brief.")
        raw = client.generate(MODEL, "count", raw=True, options={"num_predict": 3})
        stopped = client.generate(MODEL, "count", options=ollama.Options(stop=[" t"], seed=3, num_ctx=4096))
        streamed = list(client.generate(MODEL, "count", stream=True))
    assert whole.response == "one two three"
    assert whole.prompt_eval_count == len("<system>Be brief.\n<user>count\n<assistant>")
    assert (raw.response, raw.done_reason, raw.prompt_eval_count) == ("one", "length", 5)
    assert (stopped.response, stopped.done_reason) == ("one", "stop")
    assert "".join(part.response or "" for part in streamed) == whole.response


def test_logprobs(client: ollama.Client) -> None:
    whole = client.generate(MODEL, "a", logprobs=True, options={"num_predict": 2})
    assert whole.logprobs is not None
    assert [(entry.token, entry.logprob) for entry in whole.logprobs] == [("H", -1.0), ("e", -1.0)]
    parts = list(client.chat(MODEL, MESSAGES, logprobs=True, stream=True, options={"num_predict": 2}))
    assert [entry.token for part in parts for entry in part.logprobs or ()] == ["H", "e"]


def test_an_empty_request_says_that_the_model_is_there(client: ollama.Client) -> None:
    assert client.generate(MODEL, keep_alive="5m").done_reason == "load"
    assert client.chat(MODEL, []).done_reason == "load"


@pytest.mark.row("X-OLLAMA", "embed is refused by name until pooling exists")
@pytest.mark.parametrize(
    ("act", "status", "said"),
    [
        (lambda client: client.embed(MODEL, "text"), 400, "embed is not supported"),
        (lambda client: client.embeddings(MODEL, "text"), 400, "embed is not supported"),
        (lambda client: client.chat("other", MESSAGES), 404, "model 'other' not found"),
        (lambda client: client.show("other"), 404, "model 'other' not found"),
        (lambda client: client.generate(MODEL, "a", suffix="b"), 400, "suffix is not supported"),
        (lambda client: client.generate(MODEL, "a", context=[1, 2]), 400, "context is not supported"),
        (lambda client: client.generate(MODEL, "a", think=True), 400, "think is not supported"),
        (lambda client: client.generate(MODEL, "a", options={"temperature": -1}), 400, "temperature=-1"),
        (lambda client: client.generate(MODEL, "a", options={"mirostat": 2}), 400, "mirostat is not supported"),
        (lambda client: client.generate(MODEL, "a", options={"tempratur": 1}), 400, "did you mean 'temperature'"),
        (lambda client: client.chat(MODEL, [MESSAGES[0] | {"images": [b"x"]}]), 400, "images is not supported"),
        (lambda client: list(client.chat("other", MESSAGES, stream=True)), 404, "model 'other' not found"),
        (lambda client: client.pull("other"), 400, "/api/pull is not supported"),
    ],
)
def test_refusals_reach_the_client_in_words(client: ollama.Client, act: Any, status: int, said: str) -> None:
    with pytest.raises(ollama.ResponseError) as caught:
        act(client)
    assert caught.value.status_code == status
    assert said in caught.value.error


def test_a_failure_in_mid_stream_is_told_in_a_line_of_the_stream() -> None:
    with in_thread(latency=0.01) as server:
        drawn = server.worker.next_token
        server.worker.row_error = lambda token_ids: "the row is lost" if token_ids[-1] == ord("l") else None
        parts = ollama.Client(host=server.address).chat(MODEL, MESSAGES, stream=True)
        heard = ""
        with pytest.raises(ollama.ResponseError, match="the row is lost"):
            for part in parts:
                heard += part.message.content or ""
        assert heard == "Hel" and server.worker.next_token is drawn


@pytest.mark.anyio
async def test_the_asynchronous_client() -> None:
    async with on_loopback() as server:
        client = ollama.AsyncClient(host=server.address)
        parts = [part async for part in await client.chat(MODEL, MESSAGES, stream=True)]
        whole = await client.generate(MODEL, "x")
        await client._client.aclose()
    assert "".join(part.message.content or "" for part in parts) == HELLO == whole.response


HERMES = (
    "{# <tool_call> #}{{ tools | tojson if tools else '' }}{% for m in messages %}<{{ m.role }}>{{ m.content }}\n"
    "{% endfor %}<assistant>{{ '<think></think>' if enable_thinking is false else '' }}"
)
TOOLS: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]


@pytest.mark.row("TOOLS-CALLING-CORE", "the `ollama` Python client calls tools, whole and streamed")
def test_tools_and_thinking() -> None:
    written = '<think>Hm.</think>I look.<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'
    config = EngineConfig(model={"chat_template": HERMES}, cache={"num_blocks": 4096})
    with in_thread(scripted(written), config=config) as server:
        client = ollama.Client(host=server.address)
        whole = client.chat(MODEL, MESSAGES, tools=TOOLS)
        parts = list(client.chat(MODEL, MESSAGES, tools=TOOLS, stream=True))
        plain = client.chat(MODEL, MESSAGES, think=False)
        assert client.show(MODEL).capabilities == ["completion", "tools", "thinking"]
    assert (whole.message.thinking, whole.message.content) == ("Hm.", "I look.")
    assert whole.message.tool_calls is not None
    [call] = whole.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Oslo"})
    assert "".join(part.message.thinking or "" for part in parts) == "Hm."
    assert "".join(part.message.content or "" for part in parts) == "I look."
    assert [part.message.tool_calls for part in parts if part.message.tool_calls] == [whole.message.tool_calls]
    assert plain.message.thinking is None and "<tool_call>" in (plain.message.content or "")
