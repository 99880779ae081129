"""The openai client's own Responses helpers against a server on loopback: create, stream, parse, and a tool round trip."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from api_server import MODEL, in_thread
from infer import EngineConfig
from infer.api.reply_fields import REPLY_FIELDS
from infer.engine.step import SamplingSpec
from infer.testing.fake_engine import scripted
from served import letters

ROW = "SERVE-RESPONSES-MESSAGES"
TEMPLATE = (
    "{# <think></think><tool_call> #}{{ tools | tojson if tools else '' }}{% for m in messages %}<{{ m.role }}>"
    "{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls else '' }}\n{% endfor %}<assistant>"
)
CALL = '<think>\nWhich city?\n</think>\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
ANSWER = "<think>\nSnow.\n</think>\n\nSnow in Oslo."
REPORT = '{"city":"Oslo","snow":true}'
QUESTION = "How is the weather?"


class GetWeather(BaseModel):
    city: Literal["Oslo", "Rome"]


class Report(BaseModel):
    city: str
    snow: bool


PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [{"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": False}]


def forecaster(token_ids: Sequence[int], sampling: SamplingSpec) -> int:
    """Calls first; answers once the prompt has a result."""
    told = b"<tool>" in bytes(token_id for token_id in token_ids if token_id < 256)
    return scripted(ANSWER if told else CALL)(token_ids, sampling)


def serving(next_token: Any = forecaster) -> Any:
    return in_thread(next_token, config=EngineConfig(model={"chat_template": TEMPLATE}, cache={"num_blocks": 4096}))


def connected(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url, api_key="x", max_retries=0)


@pytest.mark.row(
    ROW, "the openai client's responses.create and stream run a tool-use and thinking script, counts as in chat"
)
def test_a_tool_round_trip_whole_and_streamed() -> None:
    kinds: list[str] = []
    with serving() as server, connected(server) as client:
        first = client.responses.create(model=MODEL, input=QUESTION, tools=TOOLS)
        thought, call = first.output
        assert thought.type == "reasoning" and thought.content is not None
        assert "Which city?" in thought.content[0].text
        assert call.type == "function_call" and (call.name, call.arguments) == ("get_weather", '{"city": "Oslo"}')
        result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "snow"}]
        on = client.responses.create(model=MODEL, input=result, tools=TOOLS, previous_response_id=first.id)
        with client.responses.stream(model=MODEL, input=result, tools=TOOLS, previous_response_id=first.id) as stream:
            text = ""
            for event in stream:
                kinds.append(event.type)
                if event.type == "response.output_text.delta":
                    text += event.delta
            final = stream.get_final_response()
        # The history sent back instead, as the client's own objects.
        history: Any = [{"role": "user", "content": QUESTION}, *first.output, *result]
        back = client.responses.create(model=MODEL, input=history, tools=TOOLS)
        chat_history: Any = [
            {"role": "user", "content": QUESTION},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {
                        "id": call.call_id,
                        "type": "function",
                        "function": {"name": call.name, "arguments": call.arguments},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": call.call_id, "content": "snow"},
        ]
        chat_tools: Any = [{"type": "function", "function": {key: v for key, v in TOOLS[0].items() if key != "type"}}]
        chat = client.chat.completions.create(model=MODEL, messages=chat_history, tools=chat_tools)
        kept = client.responses.retrieve(on.id)
        items = client.responses.input_items.list(on.id).data
        client.responses.delete(on.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(on.id)
    for response in (on, final, back):
        assert response.output_text.strip() == "Snow in Oslo." and response.status == "completed"
        assert [item.type for item in response.output] == ["reasoning", "message"]
    assert text == final.output_text
    assert kept == on and items[0].type == "function_call_output"
    assert {"response.reasoning_text.delta", "response.output_text.done", "response.completed"} <= set(kinds)
    assert on.usage is not None and back.usage is not None and final.usage is not None and chat.usage is not None
    details = chat.usage.completion_tokens_details
    assert details is not None and details.reasoning_tokens
    for usage in (on.usage, back.usage, final.usage):
        assert (usage.input_tokens, usage.output_tokens, usage.output_tokens_details.reasoning_tokens) == (
            chat.usage.prompt_tokens,
            chat.usage.completion_tokens,
            details.reasoning_tokens,
        )
    assert set(on.model_extra or {}) == {field.name for field in REPLY_FIELDS["/v1/responses"]}
    Response.model_validate({**on.to_dict(), "usage": None})  # what the client takes on trust is what OpenAI documents


def test_parse_gives_the_model_and_the_function_s_arguments() -> None:
    with serving(scripted(REPORT)) as server, connected(server) as client:
        done = client.responses.parse(model=MODEL, input=QUESTION, text_format=Report)
        with client.responses.stream(model=MODEL, input=QUESTION, text_format=Report) as stream:
            streamed = stream.get_final_response()
        # What was parsed goes back as it came.
        history: Any = [{"role": "user", "content": QUESTION}, *done.output, {"role": "user", "content": "Again."}]
        again = client.responses.parse(model=MODEL, input=history, text_format=Report)
    assert done.output_parsed == streamed.output_parsed == again.output_parsed == Report(city="Oslo", snow=True)
    strict: Any = [openai.pydantic_function_tool(GetWeather, name="get_weather")]
    with serving(letters) as server, connected(server) as client:
        called = client.responses.parse(
            model=MODEL, input=QUESTION, tools=strict, tool_choice="required", extra_body={"seed": 1}
        )
    call = called.output[-1]
    assert call.type == "function_call" and isinstance(call.parsed_arguments, GetWeather), called


def test_refusals_are_the_client_s_exceptions() -> None:
    with serving() as server, connected(server) as client:
        with pytest.raises(openai.BadRequestError) as unknown:
            client.responses.create(model=MODEL, input=QUESTION, previous_response_id="resp_none")
        with pytest.raises(openai.BadRequestError, match="background"):
            client.responses.create(model=MODEL, input=QUESTION, background=True)
        with pytest.raises(openai.NotFoundError):
            client.responses.cancel("resp_none")
    assert unknown.value.code == "previous_response_not_found" and unknown.value.param == "previous_response_id"
