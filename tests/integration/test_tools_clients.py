"""Tools and structured answers by real clients against a real server: openai's own helpers, pydantic-ai, and SmolLM2."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from api_server import MODEL, in_thread
from infer import Engine, EngineConfig
from infer.engine.step import SamplingSpec
from infer.testing.fake_engine import scripted
from integration.live_server import live_server

CORE = "TOOLS-CALLING-CORE"
TEMPLATE = (
    "{# <tool_call> #}{{ tools | tojson if tools else '' }}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{{ m.tool_calls | tojson if m.tool_calls else '' }}\n{% endfor %}<assistant>"
)
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
ANSWER = "Snow in Oslo."
USER: Any = [{"role": "user", "content": "How is the weather?"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"enum": ["Oslo", "Rome"]},
                    "days": {"type": "integer", "minimum": 1, "maximum": 9},
                },
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "maxProperties": 0}}},
]
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}


def forecaster(token_ids: Sequence[int], sampling: SamplingSpec) -> int:
    """Calls first; answers once the prompt has a result."""
    told = b"<tool>" in bytes(token_id for token_id in token_ids if token_id < 256)
    return scripted(ANSWER if told else CALL)(token_ids, sampling)


def serving(next_token: Any = forecaster) -> Any:
    config = EngineConfig(model={"chat_template": TEMPLATE}, cache={"num_blocks": 4096})
    return in_thread(next_token, config=config)


@pytest.mark.row(CORE, "the openai client's assembled stream equals the non-streamed tool calls byte for byte")
def test_the_openai_client_whole_streamed_and_round_trip() -> None:
    with serving() as server, openai.OpenAI(base_url=server.url, api_key="x", max_retries=0) as client:
        headers = {"X-Request-Id": "same"}
        whole = client.chat.completions.create(model=MODEL, messages=USER, tools=TOOLS, extra_headers=headers)
        with client.chat.completions.stream(model=MODEL, messages=USER, tools=TOOLS, extra_headers=headers) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_completion()
        [choice], [streamed] = whole.choices, final.choices
        assert choice.finish_reason == streamed.finish_reason == "tool_calls"
        assert choice.message.tool_calls is not None and streamed.message.tool_calls is not None
        [call], [other] = choice.message.tool_calls, streamed.message.tool_calls
        assert call.type == other.type == "function"
        assert (call.id, call.function.name, call.function.arguments) == (
            other.id,
            other.function.name,
            other.function.arguments,
        )
        assert call.function.arguments == '{"city": "Oslo"}'
        assert "tool_calls.function.arguments.delta" in kinds
        history = [*USER, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "snow"}]
        told = client.chat.completions.create(model=MODEL, messages=history, tools=TOOLS)
    assert told.choices[0].message.content == ANSWER and not told.choices[0].message.tool_calls


class GetWeather(BaseModel):
    city: Literal["Oslo", "Rome"]


class Report(BaseModel):
    city: str
    snow: bool


def test_openai_s_parse_helpers() -> None:
    """A strict function made of a pydantic model, and a structured answer."""
    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    with serving() as server, openai.OpenAI(base_url=server.url, api_key="x", max_retries=0) as client:
        called = client.chat.completions.parse(model=MODEL, messages=USER, tools=[tool])
    assert called.choices[0].message.tool_calls is not None
    assert called.choices[0].message.tool_calls[0].function.parsed_arguments == GetWeather(city="Oslo")
    with (
        serving(scripted('{"city":"Oslo","snow":true}')) as server,
        openai.OpenAI(base_url=server.url, api_key="x", max_retries=0) as client,
    ):
        report = client.chat.completions.parse(model=MODEL, messages=USER, response_format=Report)
    assert report.choices[0].message.parsed == Report(city="Oslo", snow=True)


@pytest.mark.row(CORE, "pydantic-ai calls a tool and answers with its result, whole and streamed")
def test_pydantic_ai_round_trip() -> None:
    asked: list[str] = []
    with serving() as server:
        provider = OpenAIProvider(base_url=server.url, api_key="x")
        agent = Agent(OpenAIChatModel(MODEL, provider=provider))

        @agent.tool_plain
        def get_weather(city: str) -> str:
            """The weather of a city."""
            asked.append(city)
            return "snow"

        done = agent.run_sync("How is the weather?")
        streamed = agent.run_stream_sync("How is the weather?")
        text = streamed.get_output()
    assert done.output == text == ANSWER
    assert asked == ["Oslo", "Oslo"]


@pytest.mark.model
@pytest.mark.row(CORE, "required or named choice always yields a call that validates against its schema")
def test_smollm2_calls_what_it_must(smollm2_gguf: Path) -> None:
    """Its template knows no tools: they are told in words, and the grammar does the rest, at temperature 1."""
    settings = {"model": {"ref": str(smollm2_gguf), "max_model_len": 1024}, "cache": {"num_blocks": 256}}
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    with (
        live_server(lambda config: Engine(config), **settings) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=300) as client,
    ):
        model = client.models.list().data[0].id
        for seed, choice in enumerate((named, "required", named, "required")):
            asked: dict[str, Any] = {"model": model, "messages": USER, "tools": TOOLS, "tool_choice": choice}
            asked |= {"seed": seed, "max_tokens": 300, "parallel_tool_calls": False}
            done = client.chat.completions.create(**asked, extra_headers={"X-Request-Id": f"r{seed}"})
            with client.chat.completions.stream(**asked, extra_headers={"X-Request-Id": f"r{seed}"}) as stream:
                final = stream.get_final_completion()
            message = done.choices[0].message
            assert done.choices[0].finish_reason == "tool_calls", done
            [call] = message.tool_calls or []
            assert call.type == "function"
            assert choice == "required" or call.function.name == "get_weather"
            jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
            [other] = final.choices[0].message.tool_calls or []
            assert (other.id, other.function.arguments) == (call.id, call.function.arguments)
        history: Any = [*USER, message, {"role": "tool", "tool_call_id": call.id, "content": "snow"}]
        told = client.chat.completions.create(
            model=model, messages=history, tools=TOOLS, tool_choice="none", max_tokens=20, temperature=0
        )
    assert told.choices[0].message.content and not told.choices[0].message.tool_calls
