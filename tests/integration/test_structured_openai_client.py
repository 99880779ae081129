"""Structured output with the openai Python client's own helpers against a server on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from api_server import MODEL, on_loopback
from served import letters

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.row(
        "TOOLS-STRUCTURED-CORE", "output is forced to fit a JSON schema, with the openai client's parse helper"
    ),
]
USER: Any = [{"role": "user", "content": "hi"}]


class Paint(BaseModel):
    colour: Literal["red", "green"]
    coats: Literal[1, 2]
    dry: bool


@pytest.fixture
async def client() -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        on_loopback(letters) as server,
        openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0) as client,
    ):
        yield client


async def test_the_parse_helper_gives_the_model(client: openai.AsyncOpenAI) -> None:
    for seed in range(3):
        done = await client.chat.completions.parse(
            model=MODEL, messages=USER, response_format=Paint, max_tokens=600, seed=seed
        )
        assert done.choices[0].finish_reason == "stop"
        assert isinstance(done.choices[0].message.parsed, Paint)


async def test_the_stream_helper_gives_it_too(client: openai.AsyncOpenAI) -> None:
    async with client.chat.completions.stream(
        model=MODEL, messages=USER, response_format=Paint, max_tokens=600, seed=5
    ) as stream:
        async for _ in stream:
            pass
        done = await stream.get_final_completion()
    assert isinstance(done.choices[0].message.parsed, Paint)


async def test_a_schema_that_cannot_be_kept_is_the_clients_bad_request(client: openai.AsyncOpenAI) -> None:
    bad: Any = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"not": {"type": "null"}}, "strict": True},
    }
    with pytest.raises(openai.BadRequestError, match="not") as refused:
        await client.chat.completions.create(model=MODEL, messages=USER, response_format=bad)
    assert refused.value.param == "response_format"


async def test_vllms_field_through_extra_body(client: openai.AsyncOpenAI) -> None:
    done = await client.chat.completions.create(
        model=MODEL, messages=USER, max_tokens=20, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    assert done.choices[0].message.content in ("yes", "no")
