"""What `engine.generate` and `engine.stream` tell of a chat's answer: content, reasoning and tool calls; `text` stays whole."""

from __future__ import annotations

import json
from typing import Any

import pytest

from infer import Completion, EngineConfig, InvalidRequestError, SamplingParams, ToolCall
from infer.engine.step import SamplingSpec
from infer.testing.fake_engine import EOS, fake_engine
from served import Script, letters

pytestmark = pytest.mark.anyio

ROW = "TOOLS-CALLING-CORE"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>'
QWEN = (
    "{% if tools %}# Tools\n<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>\n"
    'For each function call, return a json object within <tool_call></tool_call> XML tags: {"name": ..., "arguments": ...}\n'
    "{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}</tool_call>{% endfor %}\n{% endfor %}<assistant>"
    "{# <think> </think> reasoning_content #}"
)
CHAT = [{"role": "user", "content": "Weather in Oslo?"}]


def engine(says: str, template: str | None = None, **sections: Any) -> Any:
    model: dict[str, Any] = {} if template is None else {"model": {"chat_template": template}}
    return fake_engine(Script(says), EngineConfig(cache={"num_blocks": 400}, **model, **sections))


async def both(says: str, template: str | None, **options: Any) -> tuple[Completion, Completion]:
    """(generated, streamed)."""
    params = options.pop("params", SamplingParams(max_tokens=500))
    async with engine(says, template) as one:
        done = await one.generate(CHAT, params, **options)
    async with engine(says, template) as two, two.stream(CHAT, params, **options) as stream:
        async for _ in stream:
            pass
    return done, stream.result


@pytest.mark.row(ROW, "the facade parses calls and reasoning, generated and streamed alike")
@pytest.mark.parametrize("template", [None, QWEN], ids=["told_in_words", "in_the_template"])
async def test_calls_are_fields_and_text_stays_whole(template: str | None) -> None:
    says = f"I look.{CALL}"
    done, streamed = await both(says, template, tools=[TOOL])
    assert (done.text, done.finish_reason) == (says, "stop")
    assert done.content.strip() == "I look."
    [call] = done.tool_calls
    assert (call.name, json.loads(call.arguments), call.complete) == ("get_weather", {"city": "Oslo", "days": 2}, True)
    assert call.id
    assert streamed.choices[0].parsed == done.choices[0].parsed


async def test_several_calls_have_ids_of_their_own_and_go_back_as_messages() -> None:
    async with engine(CALL + "\n" + CALL, QWEN) as one:
        done = await one.generate(CHAT, SamplingParams(max_tokens=500), tools=[TOOL])
        assert len({call.id for call in done.tool_calls}) == 2
        asked = [
            *CHAT,
            {"role": "assistant", "content": done.content, "tool_calls": [c.as_message() for c in done.tool_calls]},
            *({"role": "tool", "tool_call_id": call.id, "content": "Rain."} for call in done.tool_calls),
        ]
        again = await one.generate(asked, SamplingParams(max_tokens=3), tools=[TOOL])
        shown = one.tokenizer.decode(list(again.prompt_token_ids))
    assert shown.count("<tool_call>get_weather</tool_call>") == 2
    assert "Rain." in shown


async def test_a_template_without_tools_is_told_of_them() -> None:
    async with engine("x") as one:
        done = await one.generate(CHAT, SamplingParams(max_tokens=1), tools=[TOOL])
        assert "get_weather" in one.tokenizer.decode(list(done.prompt_token_ids))


async def test_without_tools_a_call_is_text() -> None:
    done, _ = await both(CALL, QWEN)
    assert (done.content, done.tool_calls) == (CALL, ())


async def test_a_prompt_that_is_no_chat_is_not_read() -> None:
    async with engine(CALL, QWEN) as one:
        done = await one.generate("Weather?", SamplingParams(max_tokens=500))
    assert (done.content, done.reasoning, done.tool_calls, done.choices[0].parsed) == (CALL, "", (), None)


@pytest.mark.parametrize("reads", [True, False])
async def test_reasoning_is_a_field(reads: bool) -> None:
    says = f"<think>Hm, Oslo.</think>Fine.{CALL}"
    sections = {} if reads else {"structured_output": {"reasoning_parser": "none"}}
    template = "{{ messages[0].content }}{# <think> </think> reasoning_content #}<assistant>" + QWEN
    async with engine(says, template, **sections) as one:
        done = await one.generate(CHAT, SamplingParams(max_tokens=500), tools=[TOOL])
    assert done.text == says
    assert len(done.tool_calls) == 1
    if reads:
        assert (done.reasoning, done.content.strip()) == ("Hm, Oslo.", "Fine.")
    else:
        assert done.reasoning == ""


async def test_a_call_that_is_cut_off_is_there_as_far_as_it_came() -> None:
    done, _ = await both(CALL, QWEN, tools=[TOOL], params=SamplingParams(max_tokens=len(CALL) - 25))
    assert done.finish_reason == "length"
    [call] = done.tool_calls
    assert (call.name, call.complete) == ("get_weather", False)


@pytest.mark.parametrize("include_stop", [True, False])
async def test_a_stop_string_cuts_all_parts(include_stop: bool) -> None:
    params = SamplingParams(max_tokens=500, stop=["STOP"], include_stop=include_stop)
    done, streamed = await both(f"One. STOP {CALL}", QWEN, tools=[TOOL], params=params)
    assert done.content == done.text == ("One. STOP" if include_stop else "One. ")
    assert done.tool_calls == streamed.tool_calls == ()


async def test_each_choice_is_read_by_itself() -> None:
    def next_token(token_ids: Any, sampling: SamplingSpec) -> int:
        text = bytes(i for i in token_ids if i < 256).decode()
        said = text.rpartition("<assistant>")[2]
        wanted = CALL if sampling.seed % 2 else "No."
        return ord(wanted[len(said)]) if len(said) < len(wanted) else EOS

    config = EngineConfig(cache={"num_blocks": 400}, model={"chat_template": QWEN})
    async with fake_engine(next_token, config) as one:
        done = await one.generate(CHAT, SamplingParams(n=4, seed=0, max_tokens=500), tools=[TOOL])
    assert [len(choice.tool_calls) for choice in done.choices] == [0, 1, 0, 1]
    assert [choice.content for choice in done.choices][::2] == ["No.", "No."]
    ids = [call.id for choice in done.choices for call in choice.tool_calls]
    assert len(set(ids)) == 2


@pytest.mark.parametrize("tools", ["x", [1], {"a": 1}])
async def test_tools_that_are_none_are_refused(tools: Any) -> None:
    async with fake_engine(letters) as one:
        with pytest.raises(InvalidRequestError, match="tools"):
            await one.generate(CHAT, tools=tools)
        with pytest.raises(InvalidRequestError, match="chat messages"):
            await one.generate("raw", tools=[TOOL])


def endless() -> dict[str, Any]:
    found: dict[str, Any] = {"type": "function"}
    found["function"] = found
    return found


@pytest.mark.parametrize("template", [None, QWEN], ids=["told_in_words", "in_the_template"])
@pytest.mark.parametrize(
    "tool", [{"function": object()}, {"function": {"name": b"x"}}, endless()], ids=["object", "bytes", "cycle"]
)
async def test_tools_that_are_no_json_are_refused(tool: Any, template: str | None) -> None:
    async with engine("x", template) as one:
        with pytest.raises(InvalidRequestError, match=r"tools|nested"):
            await one.generate(CHAT, SamplingParams(max_tokens=1), tools=[tool])


@pytest.mark.parametrize(
    "tool", [{}, {"function": 5}, {"function": {"name": 3}}, {"function": {"name": "f", "parameters": 7}}]
)
async def test_odd_tools_change_no_answer(tool: Any) -> None:
    async with engine(CALL, QWEN) as one:
        done = await one.generate(CHAT, SamplingParams(max_tokens=500), tools=[tool])
    assert [call.name for call in done.tool_calls] == ["get_weather"]


async def test_a_template_whose_calls_nobody_knows_is_refused() -> None:
    template = "{% for t in tools or [] %}{{ t }}{% endfor %}{{ messages[0].content }}<answer>"
    async with engine("x", template) as one:
        with pytest.raises(InvalidRequestError, match="does not know"):
            await one.generate(CHAT, tools=[TOOL])
        assert (await one.generate(CHAT, SamplingParams(max_tokens=1))).content == "x"


def test_a_call_as_a_message() -> None:
    call = ToolCall(id="call-1", name="f", arguments="{}")
    assert call.as_message() == {"id": "call-1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
