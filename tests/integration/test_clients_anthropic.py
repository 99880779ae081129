"""Anthropic's own Python client against a real server on loopback: tools, thinking, stops, counts, errors, hanging up."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anthropic
import jsonschema
import openai
import pytest
from pydantic import BaseModel

from api_server import MODEL, Server, in_thread
from infer import Engine, EngineConfig
from infer.engine.step import SamplingSpec
from infer.testing.fake_engine import fake_engine, scripted
from integration.live_server import live_server

ROW = "SERVE-RESPONSES-MESSAGES"
TEMPLATE = (
    "{# <tool_call> <think> #}{{ tools | tojson if tools else '' }}{% for m in messages %}<{{ m.role }}>"
    "{{ '<think>' ~ m.reasoning_content ~ '</think>' if m.reasoning_content else '' }}{{ m.content }}"
    "{{ m.tool_calls | tojson if m.tool_calls else '' }}\n{% endfor %}{{ '<assistant>' if add_generation_prompt else '' }}"
)
THOUGHT, SAID, ANSWER = "They want the weather.", "I look.", "Snow in Oslo: ❄."
CALL = f'<think>{THOUGHT}</think>{SAID}<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "Oslo"}}}}\n</tool_call>'
USER: Any = [{"role": "user", "content": "How is the weather?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [{"name": "get_weather", "description": "The weather of a city", "input_schema": SCHEMA}]
ASK: dict[str, Any] = {"model": MODEL, "max_tokens": 300, "messages": USER}


def forecaster(token_ids: Sequence[int], sampling: SamplingSpec) -> int:
    """Thinks and calls first; answers once the prompt has a result."""
    told = b"<tool>" in bytes(token_id for token_id in token_ids if token_id < 256)
    return scripted(ANSWER if told else CALL)(token_ids, sampling)


def serving(next_token: Any = forecaster, **settings: Any) -> Any:
    config = EngineConfig(model={"chat_template": TEMPLATE}, cache={"num_blocks": 4096})
    return in_thread(next_token, config=config, settings=settings)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.address, api_key="none", max_retries=0) as made:
        yield made


def result(message: Any) -> Any:
    """The conversation with the answer to its call."""
    call = message.content[-1]
    assert call.type == "tool_use"
    block = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "snow"}]}
    return [*USER, {"role": "assistant", "content": message.content}, {"role": "user", "content": [block]}]


@pytest.mark.row(ROW, "the anthropic client's messages.create runs a tool-use and thinking script")
def test_a_tool_round_trip(client: anthropic.Anthropic, server: Server) -> None:
    asked = client.messages.create(**ASK, tools=TOOLS)
    thinking, said, call = asked.content
    assert thinking.type == "thinking" and (thinking.thinking, bool(thinking.signature)) == (THOUGHT, True)
    assert said.type == "text" and said.text == SAID
    assert call.type == "tool_use" and (call.name, call.input) == ("get_weather", {"city": "Oslo"})
    assert (asked.stop_reason, asked.stop_sequence, asked.model) == ("tool_use", None, MODEL)
    told = client.messages.create(**ASK | {"messages": result(asked)}, tools=TOOLS)
    assert [block.type for block in told.content] == ["text"] and told.content[0].text == ANSWER  # type: ignore[union-attr]
    assert told.stop_reason == "end_turn" and told._request_id
    counts = told.usage
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as other:
        history: Any = [
            *USER,
            {
                "role": "assistant",
                "content": SAID,
                "reasoning_content": THOUGHT,
                "tool_calls": [
                    {
                        "id": call.id,
                        "type": "function",
                        "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": call.id, "content": "snow"},
        ]
        tools: Any = [
            {
                "type": "function",
                "function": {"name": "get_weather", "parameters": SCHEMA, "description": "The weather of a city"},
            }
        ]
        same = other.chat.completions.create(model=MODEL, messages=history, tools=tools).usage
    assert same is not None
    assert counts.input_tokens + (counts.cache_read_input_tokens or 0) == same.prompt_tokens
    assert counts.output_tokens == same.completion_tokens


@pytest.mark.row(
    ROW, "the anthropic client's messages.stream: events in the documented order, with thinking and a tool"
)
def test_a_tool_round_trip_streamed(client: anthropic.Anthropic) -> None:
    with client.messages.stream(**ASK, tools=TOOLS, thinking={"type": "enabled", "budget_tokens": 100}) as stream:
        events = list(stream)
        asked = stream.get_final_message()
    kinds = [event.type for event in events if event.type not in ("text", "thinking", "input_json", "signature")]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert [kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before] == [
        "message_start", *block, *block, *block, "message_delta", "message_stop",
    ]  # fmt: skip
    assert "".join(event.thinking for event in events if event.type == "thinking") == THOUGHT
    assert "".join(event.text for event in events if event.type == "text") == SAID
    pieces = [event for event in events if event.type == "input_json"]
    assert "".join(event.partial_json for event in pieces) == '{"city": "Oslo"}'
    assert len([event for event in events if event.type == "signature"]) == 1
    whole = client.messages.create(**ASK, tools=TOOLS)
    written = [b.model_dump(exclude={"id", "parsed_output"}, exclude_none=True) for b in asked.content]
    assert written == [b.model_dump(exclude={"id"}, exclude_none=True) for b in whole.content]
    assert asked.usage.output_tokens == whole.usage.output_tokens
    with client.messages.stream(**ASK | {"messages": result(asked)}, tools=TOOLS) as stream:
        assert "".join(stream.text_stream) == ANSWER
        final = stream.get_final_message()
    assert (final.stop_reason, final.content[0].type) == ("end_turn", "text")


def test_the_client_s_tool_runner(client: anthropic.Anthropic) -> None:
    """It first asks the server to keep the conversation, and goes on without when that is refused."""
    asked: list[str] = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather of a city."""
        asked.append(city)
        return "snow"

    runner = client.beta.messages.tool_runner(**ASK, tools=[get_weather])
    final = runner.until_done()
    assert asked == ["Oslo"]
    assert final.content[0].text == ANSWER  # type: ignore[union-attr]


class Report(BaseModel):
    city: str
    snow: bool


def test_stops_limits_counts_and_forms() -> None:
    with serving(scripted('{"city":"Oslo","snow":true}')) as server:
        client = anthropic.Anthropic(base_url=server.address, auth_token="none", max_retries=0)
        stopped = client.messages.create(**ASK, stop_sequences=["nothing", ',"snow'])
        cut = client.messages.create(**ASK | {"max_tokens": 5}, extra_body={"temperature": 0, "top_k": 5, "top_p": 0.9})
        parsed = client.messages.parse(**ASK, output_format=Report)
        counted = client.messages.count_tokens(model=MODEL, messages=USER, system="Be brief.", tools=TOOLS)
        same = client.messages.create(**ASK, system="Be brief.", tools=TOOLS)
        listed = [(model.id, model.display_name, model.created_at.year > 2000) for model in client.models.list()]
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", ',"snow')
    assert stopped.content[0].text == '{"city":"Oslo"'  # type: ignore[union-attr]
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 5)
    assert parsed.parsed_output == Report(city="Oslo", snow=True)
    assert counted.input_tokens == same.usage.input_tokens + (same.usage.cache_read_input_tokens or 0)
    assert listed == [(MODEL, MODEL, True), ("alias", "alias", True)]


@pytest.mark.row(ROW, "errors reach the anthropic client as its own types, whole and in a stream")
def test_errors() -> None:
    with serving(api_keys=("secret",)) as server:
        wrong = anthropic.Anthropic(base_url=server.address, api_key="wrong", max_retries=0)
        with pytest.raises(anthropic.AuthenticationError, match="API key is wrong"):
            wrong.messages.create(**ASK)
        client = anthropic.Anthropic(base_url=server.address, api_key="secret", max_retries=0)
        with pytest.raises(anthropic.NotFoundError, match="'other' is not served"):
            client.messages.create(**ASK | {"model": "other"})
        image: Any = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
        with pytest.raises(anthropic.BadRequestError, match="blocks of type 'image' are not supported") as caught:
            client.messages.create(**ASK | {"messages": [{"role": "user", "content": [image]}]})
        assert caught.value.type == "invalid_request_error" and caught.value.request_id
        with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\]\.type='bash_20250124'"):
            client.messages.create(**ASK, tools=[{"type": "bash_20250124", "name": "bash"}])
        with (
            pytest.raises(anthropic.BadRequestError, match="'repetition'"),
            client.messages.stream(**ASK, extra_body={"repetition": 1}),
        ):
            pass


def test_an_engine_that_fails_in_the_middle_of_a_stream() -> None:
    def breaking(token_ids: Sequence[int], sampling: SamplingSpec) -> int:
        if bytes(token_ids[-3:]) == b"xxx":
            raise ValueError("broken on purpose")
        return ord("x")

    with serving(breaking) as server:
        client = anthropic.Anthropic(base_url=server.address, api_key="none", max_retries=0)
        seen = []
        with pytest.raises(anthropic.APIStatusError) as caught, client.messages.stream(**ASK) as stream:
            for event in stream:
                seen.append(event.type)
    assert seen[0] == "message_start" and "message_stop" not in seen
    assert caught.value.type == "api_error"


def test_hanging_up_frees_the_request() -> None:
    def endless(config: EngineConfig) -> Engine:
        return fake_engine(lambda ids, sampling: ord("x"), config, latency=0.01, max_position=100_000)

    with live_server(endless, cache={"num_blocks": 8192}) as server:
        with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
            ask = ASK | {"model": server.engine.config.model.ref, "max_tokens": 90_000}
            with client.messages.stream(**ask) as stream:
                for event in stream:
                    if event.type == "text":
                        break
                assert server.statistics().running == 1
        server.wait_for(lambda now: now.running == 0 and now.waiting == 0)


@pytest.mark.model
@pytest.mark.row(ROW, "Messages: SmolLM2 calls what it must, and answers with the result")
def test_smollm2(smollm2_gguf: Path) -> None:
    settings = {"model": {"ref": str(smollm2_gguf), "max_model_len": 1024}, "cache": {"num_blocks": 256}}
    with (
        live_server(lambda config: Engine(config), **settings) as server,
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=300) as client,
    ):
        ask = ASK | {"model": client.models.list().data[0].id, "extra_body": {"temperature": 0}}
        with client.messages.stream(**ask, tools=TOOLS, tool_choice={"type": "tool", "name": "get_weather"}) as stream:
            asked = stream.get_final_message()
        [call] = asked.content
        assert call.type == "tool_use" and asked.stop_reason == "tool_use"
        jsonschema.validate(json.loads(json.dumps(call.input)), SCHEMA)
        told = client.messages.create(
            **ask | {"messages": result(asked), "max_tokens": 20}, tools=TOOLS, tool_choice={"type": "none"}
        )
        again = client.messages.create(
            **ask | {"messages": result(asked), "max_tokens": 20}, tools=TOOLS, tool_choice={"type": "none"}
        )
    assert told.content[0].type == "text" and told.content == again.content
    assert (again.usage.cache_read_input_tokens or 0) >= 64
