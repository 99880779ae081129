"""The openai Python client against a real server on loopback: async and blocking, whole and streamed, and its errors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import openai
import pytest

from api_server import HELLO, MODEL, Server, in_thread, on_loopback
from infer import Engine, EngineConfig, SamplingParams
from infer.api import serve
from infer.config.engine import ApiSection

ASYNC = pytest.mark.anyio
pytestmark = pytest.mark.row("SERVE-OAI-BASIC", "the openai Python client runs a fixed script without an exception")
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def client() -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        on_loopback(settings={"api_keys": "sk-test"}) as server,
        openai.AsyncOpenAI(base_url=server.url, api_key="sk-test", max_retries=0) as client,
    ):
        yield client


@ASYNC
async def test_chat_whole_and_streamed(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(model=MODEL, messages=USER, logprobs=True, top_logprobs=1)  # type: ignore[arg-type]
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=USER,  # type: ignore[arg-type]
        stream=True,
        stream_options={"include_usage": True},
    )
    pieces, reasons, usage = [], [], None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            pieces.append(choice.delta.content or "")
            reasons.append(choice.finish_reason)
    assert whole.choices[0].message.content == HELLO == "".join(pieces)
    assert [reason for reason in reasons if reason] == ["stop"] and reasons[-1] == "stop"
    assert usage is not None and whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens == len(HELLO.encode()) + 1
    assert whole.choices[0].logprobs is not None and whole.choices[0].logprobs.content is not None
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens


@ASYNC
async def test_the_stream_helper(client: openai.AsyncOpenAI) -> None:
    async with client.chat.completions.stream(model=MODEL, messages=USER) as stream:  # type: ignore[arg-type]
        kinds = {event.type async for event in stream}
        final = await stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == HELLO


@ASYNC
async def test_completions_whole_and_streamed(client: openai.AsyncOpenAI) -> None:
    whole = await client.completions.create(model=MODEL, prompt=[97, 98], max_tokens=50, echo=True, logprobs=0)
    stream = await client.completions.create(model=MODEL, prompt=[97, 98], max_tokens=50, echo=True, stream=True)
    text = "".join([choice.text async for chunk in stream for choice in chunk.choices])
    assert whole.choices[0].text == "ab" + HELLO == text
    assert whole.choices[0].logprobs is not None and whole.choices[0].logprobs.tokens is not None
    assert whole.usage is not None and len(whole.choices[0].logprobs.tokens) == whole.usage.total_tokens


@ASYNC
async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL, "alias"]
    assert (await client.models.retrieve("alias")).id == "alias"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("no/such/model")


@ASYNC
async def test_errors_are_the_clients_own_types(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model=MODEL, messages=USER, temperature=-1)  # type: ignore[arg-type]
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as tools:
        await client.chat.completions.create(
            model=MODEL,
            messages=USER,  # type: ignore[arg-type]
            tools=[{"type": "web_search"}],  # type: ignore[list-item]
        )
    assert tools.value.param == "tools"
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.chat.completions.create(model="gpt-5", messages=USER)  # type: ignore[arg-type]
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.BadRequestError) as misspelt:
        await client.completions.create(model=MODEL, prompt="x", extra_body={"max_token": 3})
    assert misspelt.value.param == "max_token"


@ASYNC
async def test_a_stream_that_is_closed_early_ends_the_request(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(model=MODEL, messages=USER, stream=True)  # type: ignore[arg-type]
    async for _ in stream:
        break
    await stream.close()
    again = await client.chat.completions.create(model=MODEL, messages=USER)  # type: ignore[arg-type]
    assert again.choices[0].message.content == HELLO


@pytest.fixture(scope="module")
def blocking() -> Iterator[Server]:
    with in_thread() as server:
        yield server


def test_the_blocking_client(blocking: Server) -> None:
    with openai.OpenAI(base_url=blocking.url, api_key="any", max_retries=0) as client:
        whole = client.chat.completions.create(model=MODEL, messages=USER)  # type: ignore[arg-type, var-annotated]
        stream = client.chat.completions.create(model=MODEL, messages=USER, stream=True, n=2)  # type: ignore[arg-type, var-annotated]
        texts = {0: "", 1: ""}
        for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert whole.choices[0].message.content == HELLO
        assert texts == {0: HELLO, 1: HELLO}
        with pytest.raises(openai.BadRequestError, match="suffix"):
            client.completions.create(model=MODEL, prompt="x", suffix="y")


@ASYNC
@pytest.mark.model
@pytest.mark.parametrize("anyio_backend", [pytest.param(("asyncio", {}), id="asyncio")])
async def test_the_real_small_model(smollm2_gguf: Path) -> None:
    """Greedy answers over HTTP are those of the engine in process, whole and streamed, ids and text."""
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    config = EngineConfig(model=str(smollm2_gguf), cache={"memory": "64MiB"}, platform={"threads": 1})
    async with Engine(config) as engine, anyio.create_task_group() as tasks:
        inside = await engine.generate(messages, SamplingParams(temperature=0, max_tokens=12))
        address = await tasks.start(serve, engine, ApiSection(port=0))
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="-", max_retries=0, timeout=240) as client:
            name = (await client.models.list()).data[0].id
            asked = {"model": name, "messages": messages, "temperature": 0, "max_tokens": 12}
            whole = await client.chat.completions.create(**asked, extra_body={"return_token_ids": True})  # type: ignore[call-overload]
            stream = await client.chat.completions.create(**asked, stream=True)  # type: ignore[call-overload]
            text = "".join([choice.delta.content or "" async for chunk in stream for choice in chunk.choices])
        tasks.cancel_scope.cancel()
    assert whole.choices[0].token_ids == list(inside.token_ids)
    assert whole.prompt_token_ids == list(inside.prompt_token_ids)
    assert whole.choices[0].message.content == inside.text == text
    assert len(text) > 10
