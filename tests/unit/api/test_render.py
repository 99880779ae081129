"""Render, generate and derender give what the chat endpoint gives, byte for byte, with and without an engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_server import MODEL, in_process
from infer.api.generate import token_entry
from infer.api.render import LogprobEntry, Renderer, _position
from infer.config.engine import EngineConfig
from infer.config.model import GenerationDefaults
from infer.engine.step import SamplingSpec
from infer.errors import InvalidRequestError
from infer.testing.fake_engine import CHAT_TEMPLATE, ByteTokenizer, scripted
from infer.testing.fake_executor import NextToken
from infer.text.chat_template import ChatTemplate
from infer.types import SamplingParams, TokenLogprob

pytestmark = pytest.mark.anyio
CHAT, GENERATE = "/v1/chat/completions", "/inference/v1/generate"
CONFIG = EngineConfig(cache={"num_blocks": 4096}, api={"served_model_names": (MODEL,)})


def letters(token_ids: Sequence[int], sampling: SamplingSpec) -> int:
    """Printable, different from position to position and from seed to seed."""
    return 97 + (len(token_ids) * 7 + sampling.seed) % 26


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


SCRIPT: dict[str, tuple[NextToken, dict[str, Any]]] = {
    "an answer": (scripted("Hello, wörld! ✓"), {"messages": user("hi")}),
    "cut off in a character": (scripted("wö"), {"messages": user("hi"), "max_tokens": 2}),
    "a stop string": (scripted("one two three"), {"messages": user("count"), "stop": ["xx", " t"]}),
    "a stop string that is kept": (
        scripted("one two"),
        {"messages": user("a"), "stop": " t", "include_stop_str_in_output": True},
    ),
    "a stop string not before min_tokens": (
        scripted("aaaaaaaa"),
        {"messages": user("a"), "stop": "aa", "min_tokens": 3},
    ),
    "a stop id": (scripted("abc"), {"messages": user("a"), "stop_token_ids": [ord("c")]}),
    "several choices": (letters, {"messages": user("a"), "n": 3, "seed": 5, "max_tokens": 7}),
    "log-probabilities": (letters, {"messages": user("a"), "logprobs": True, "seed": 1, "max_tokens": 4}),
    "prompt log-probabilities and ids": (
        letters,
        {"messages": user("é"), "prompt_logprobs": 0, "return_token_ids": True, "seed": 1, "max_tokens": 2},
    ),
    "tokens as ids": (
        letters,
        {
            "messages": user("a"),
            "logprobs": True,
            "top_logprobs": 0,
            "return_tokens_as_token_ids": True,
            "seed": 9,
            "max_tokens": 3,
        },
    ),
    "a longer conversation": (
        scripted("yes"),
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                *user("one"),
                {"role": "assistant", "content": "1"},
                *user("two"),
            ]
        },
    ),
    "an open turn": (scripted("me"), {"messages": [*user("go on"), {"role": "assistant", "content": "It is "}]}),
    "everything at once": (
        letters,
        {
            "messages": user("a"),
            "model": MODEL,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": -1,
            "logit_bias": {"5": 1.5},
            "seed": 3,
            "stop": ["z"],
            "bad_words": ["q"],
            "max_completion_tokens": 12,
            "n": 2,
            "logprobs": True,
            "priority": 0,
            "cache_salt": "mine",
            "truncate_prompt_tokens": 4,
        },
    ),
}


async def chat_in_two_halves(client: httpx2.AsyncClient, asked: dict[str, Any], name: str) -> dict[str, Any]:
    """What a gateway does."""
    rendered = (await client.post(f"{CHAT}/render", json=asked, headers={"x-request-id": name})).json()
    answered = (await client.post(GENERATE, json=rendered)).json()
    request = {"generate_response": answered, "chat_request": asked, "prompt_token_ids": rendered["token_ids"]}
    reply = await client.post(f"{CHAT}/derender", json=request)
    assert reply.status_code == 200, reply.text
    body: dict[str, Any] = reply.json()
    return body


@pytest.mark.row("X-RENDER", "output of render + generate + derender equals the chat endpoint byte for byte")
@pytest.mark.parametrize("case", SCRIPT)
async def test_the_two_halves_equal_the_whole(case: str) -> None:
    next_token, asked = SCRIPT[case]
    generation = GenerationDefaults(values={"temperature": 0.25})
    async with in_process(next_token, settings={"served_model_names": (MODEL,)}, generation=generation) as (client, _):
        whole = await client.post(CHAT, json=asked, headers={"x-request-id": "same"})
        assert whole.status_code == 200, whole.text
    async with in_process(next_token, settings={"served_model_names": (MODEL,)}, generation=generation) as (client, _):
        halves = await chat_in_two_halves(client, asked, "same")
    expected = whole.json()
    halves["created"] = expected["created"]
    if "seed" not in asked:  # one is drawn for each run
        for half, choice in zip(halves["choices"], expected["choices"], strict=True):
            half["seed"] = choice["seed"]
    assert json.dumps(halves) == json.dumps(expected)


@pytest.mark.row("X-RENDER", "templating and parsing without an engine")
async def test_no_engine_is_needed_on_either_side() -> None:
    asked = {"messages": user("hi"), "stop": [" w"], "seed": 4}
    defaults = GenerationDefaults(values={"top_p": 0.5})
    renderer = Renderer.offline(ByteTokenizer(), ChatTemplate(CHAT_TEMPLATE, {}), config=CONFIG, defaults=defaults)
    rendered = await renderer.render(asked, request_id="r1")
    assert rendered == {
        "request_id": "chatcmpl-r1",
        "model": MODEL,
        "prompt_text": "<user>hi\n<assistant>",
        "token_ids": list(b"<user>hi\n<assistant>"),
        "sampling_params": {"seed": 4, "stop": (" w",), "top_p": 0.5},
        "priority": 0,
    }
    answered = {
        "request_id": "chatcmpl-r1",
        "created": 77,
        "choices": [{"index": 0, "token_ids": list(b"hello w"), "finish_reason": "stop", "stop_reason": " w"}],
    }
    reply = renderer.derender({"generate_response": answered, "chat_request": asked, "prompt_tokens": 19})
    assert reply["choices"][0]["message"]["content"] == "hello"
    assert (reply["id"], reply["created"], reply["model"]) == ("chatcmpl-r1", 77, MODEL)
    assert reply["usage"]["prompt_tokens"] == 19 and reply["usage"]["completion_tokens"] == 7


def test_text_is_taken_as_it_is() -> None:
    renderer = Renderer.offline(ByteTokenizer(), None, config=CONFIG)
    choice = {"text": "as told", "token_ids": [1, 2], "finish_reason": "length"}
    reply = renderer.derender({"generate_response": {"request_id": "x", "choices": [choice]}})
    assert reply["choices"][0]["message"]["content"] == "as told"
    assert reply["choices"][0]["finish_reason"] == "length"


def test_a_late_request_reads_as_the_chat_endpoint_tells_it() -> None:
    renderer = Renderer.offline(ByteTokenizer(), None, config=CONFIG)
    choice = {"token_ids": list(b"so far"), "finish_reason": "length", "stop_reason": "deadline"}
    [told] = renderer.derender({"generate_response": {"request_id": "x", "choices": [choice]}})["choices"]
    assert (told["finish_reason"], told["stop_reason"]) == ("length", "deadline")
    assert told["message"]["content"] == "so far"


@pytest.mark.parametrize(
    ("more", "parameter"),
    [
        ({"generate_response": {"choices": []}}, "generate_response.request_id"),
        ({"generate_response": {"request_id": "x", "choices": []}}, "generate_response.choices"),
        ({"generate_response": {"request_id": "x", "choices": [{"token_ids": [-1]}]}}, "generate_response.choices"),
        ({"chat_request": {"messages": user("a"), "logprobs": True}}, "generate_response"),
        ({"chat_request": {"messages": user("a"), "prompt_logprobs": 1}, "prompt_token_ids": [1]}, "generate_response"),
        ({"chat_request": {"messages": user("a"), "tools": [{}]}}, "tools"),
        ({"stream": True}, "stream"),
        ({"stray": 1}, "stray"),
    ],
)
def test_what_cannot_be_derendered_is_named(more: dict[str, Any], parameter: str) -> None:
    renderer = Renderer.offline(ByteTokenizer(), None, config=CONFIG)
    whole = {"generate_response": {"request_id": "x", "choices": [{"token_ids": [65]}]}}
    with pytest.raises(InvalidRequestError) as caught:
        renderer.derender(whole | more)
    assert caught.value.parameter == parameter


def test_a_stop_that_is_not_in_the_text_is_refused() -> None:
    renderer = Renderer.offline(ByteTokenizer(), None, config=CONFIG)
    choice = {"token_ids": list(b"abc"), "finish_reason": "stop", "stop_reason": "zz"}
    with pytest.raises(InvalidRequestError, match="stop_reason='zz'"):
        renderer.derender({"generate_response": {"request_id": "x", "choices": [choice]}})


async def test_render_refuses_what_chat_refuses() -> None:
    async with in_process() as (client, _):
        for body, parameter in (({}, "messages"), ({"messages": user("a"), "tempratur": 1}, "tempratur")):
            replies = [await client.post(path, json=body) for path in (CHAT, f"{CHAT}/render")]
            assert replies[0].json() == replies[1].json()
            assert replies[1].json()["error"]["param"] == parameter


@given(st.data())
def test_alternatives_survive_the_wire(data: st.DataObject) -> None:
    """Also with equal log-probabilities, and wherever the sampled token stands among them."""
    values = data.draw(st.lists(st.sampled_from([-0.5, -1.0, -2.0]), min_size=1, max_size=6))
    order = sorted(range(len(values)), key=lambda token_id: (-values[token_id], token_id))
    num_top = data.draw(st.integers(0, len(values)))
    sampled = data.draw(st.sampled_from(order))
    rank = 1 + sum(value > values[sampled] for value in values)
    top = tuple((token_id, values[token_id]) for token_id in order[:num_top])
    entry = TokenLogprob(sampled, values[sampled], rank, top)
    wire = json.loads(json.dumps(token_entry(entry)))
    back = _position(LogprobEntry.model_validate(wire), SamplingParams(logprobs=num_top))
    assert (back.token_id, back.logprob, back.rank, back.top) == (sampled, values[sampled], rank, top)
