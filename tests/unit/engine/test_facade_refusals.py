"""Wrong input: each a typed error that names parameter and value, and the engine serves on."""

from __future__ import annotations

import re
from array import array
from collections import UserString
from collections.abc import Callable
from typing import Any

import pytest

from infer import ContextLengthError, InferError, InvalidRequestError, SamplingParams
from infer.engine.engine import Engine
from infer.testing.fake_engine import fake_engine
from served import answer, letters, letters_engine, settings, wait_until_idle

pytestmark = pytest.mark.anyio


def shown(value: object) -> str:
    """A test id that is the same in every process: without addresses."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))[:60]


HI = [{"role": "user", "content": "hi"}]

PROMPTS: list[tuple[Any, str, str]] = [
    ("", "prompt", "empty"),
    ([], "prompt", "empty"),
    (None, "prompt", "NoneType"),
    (5, "prompt", "int"),
    (b"bytes", "prompt", "bytes"),
    ({"role": "user"}, "prompt", "dict"),
    ({1, 2}, "prompt", "set"),
    ([1, -1], "prompt", "-1"),
    ([1, 258], "prompt", "258"),
    ([1, 2**80], "prompt", str(2**80)),
    ([1, True], "prompt", r"prompt\[1\]=True"),
    ([1, 2.0], "prompt", r"prompt\[1\]=2.0"),
    ([1, None], "prompt", r"prompt\[1\]=None"),
    (["a", "b"], "prompt", r"prompt\[0\]='a'"),
    ([1, {"role": "user"}], "prompt", r"prompt\[1\]"),
    (UserString("text"), "prompt", "is not a token id"),
    ("broken \ud800 text", "prompt", "Unicode"),
    ([{"role": "user", "content": "\ud800"}], "prompt", "Unicode"),
]


@pytest.mark.parametrize(("prompt", "parameter", "words"), PROMPTS, ids=shown)
async def test_a_wrong_prompt_is_refused_by_name(prompt: Any, parameter: str, words: str) -> None:
    async with letters_engine() as engine:
        with pytest.raises(InvalidRequestError, match=words) as refused:
            await engine.generate(prompt)
        assert refused.value.parameter == parameter
        await assert_serving(engine)


MESSAGES: list[Any] = [
    [{}],
    [{"role": "user"}],
    [{"role": 5, "content": "x"}],
    [{"role": "user", "content": 5}],
    [{"role": "user", "content": "x"}, "text"],
    [{"role": "user", "content": "x"}, None],
    [{"role": "user", "content": {"a": object()}}],
]


@pytest.mark.parametrize("messages", MESSAGES, ids=shown)
async def test_odd_messages_are_answered_or_refused_with_a_typed_error(messages: Any) -> None:
    async with letters_engine() as engine:
        try:
            await engine.generate(messages, SamplingParams(max_tokens=1))
        except InferError as error:
            assert str(error)
        await assert_serving(engine)


async def test_prompts_longer_than_the_context_are_refused_before_they_are_looked_at() -> None:
    async with letters_engine(cache={"num_blocks": 4, "watermark": 0.0}) as engine:
        assert engine.max_model_len == 64
        with pytest.raises(ContextLengthError, match="64 tokens and the context holds 64") as refused:
            await engine.generate([1] * 64)
        assert (refused.value.parameter, refused.value.value) == ("prompt", 64)
        with pytest.raises(ContextLengthError, match="max_tokens can be at most 4"):
            await engine.generate([1] * 60, SamplingParams(max_tokens=5))
        with pytest.raises(ContextLengthError, match="10000000000000 tokens"):
            await engine.generate(range(10**13))
        done = await engine.generate([1] * 60, SamplingParams(seed=1))
        assert len(done.token_ids) == 4, "max_tokens=None goes up to the context"


PARAMS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 2.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"seed": -1}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop_token_ids": (-1,)}, "stop_token_ids"),
    ({"logit_bias": {1: 1000.0}}, "logit_bias"),
    ({"logit_bias": {1: float("inf")}}, "logit_bias"),
    ({"allowed_token_ids": ()}, "allowed_token_ids"),
    ({"bad_words": ("",)}, "bad_words"),
    ({"bad_words": ("\ud800",)}, "bad_words"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs_mode": "best"}, "logprobs_mode"),
    ({"n": 0}, "n"),
    ({"n": 10**9}, "n"),
    ({"no_such_field": 1}, "no_such_field"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"frequency_penalty": 3}, "frequency_penalty"),
]


@pytest.mark.parametrize(("values", "parameter"), PARAMS, ids=shown)
def test_wrong_sampling_parameters_are_refused_by_name(values: dict[str, Any], parameter: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        SamplingParams(**values)
    assert refused.value.parameter == parameter
    assert parameter in str(refused.value)


@pytest.mark.parametrize(("given", "meant"), [("max_token", "max_tokens"), ("temprature", "temperature")])
def test_a_misspelt_sampling_parameter_gets_the_right_name(given: str, meant: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"'{given}'; did you mean '{meant}'"):
        SamplingParams(**{given: 1})


AT_ADMISSION: list[tuple[dict[str, Any], str]] = [
    ({"params": SamplingParams(stop_token_ids=(258,))}, "stop_token_ids"),
    ({"params": SamplingParams(logit_bias={2**31 - 1: 1.0})}, "logit_bias"),
    ({"params": SamplingParams(allowed_token_ids=(1, 300))}, "allowed_token_ids"),
    ({"params": SamplingParams(logprobs=259)}, "logprobs"),
    ({"params": SamplingParams(prompt_logprobs=2**70)}, "prompt_logprobs"),
    ({"params": SamplingParams(n=65)}, "n"),
    ({"params": SamplingParams(max_tokens=2**70)}, "max_tokens"),
    ({"params": SamplingParams(min_tokens=2**70)}, "min_tokens"),
    ({"params": {"max_tokens": 3}}, "params"),
    ({"params": "greedy"}, "params"),
    ({"request_id": ""}, "request_id"),
    ({"request_id": 7}, "request_id"),
    ({"deadline": 0}, "deadline"),
    ({"deadline": -1.0}, "deadline"),
    ({"deadline": float("nan")}, "deadline"),
    ({"deadline": float("inf")}, "deadline"),
    ({"deadline": "soon"}, "deadline"),
    ({"deadline": True}, "deadline"),
    ({"priority": "high"}, "priority"),
    ({"priority": None}, "priority"),
    ({"priority": float("nan")}, "priority"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": object()}, "cache_salt"),
    ({"cache_salt": "\ud800"}, "cache_salt"),
    ({"prompt": HI, "tools": 5}, "tools"),
    ({"prompt": HI, "tools": "abc"}, "tools"),
    ({"prompt": HI, "tools": [5]}, "tools"),
    ({"prompt": "text", "tools": [{"type": "function"}]}, "tools"),
    ({"prompt": [1, 2], "tools": [{"type": "function"}]}, "tools"),
]


@pytest.mark.row("X-POISON", "a wrong value is a typed error that names it; the engine serves on")
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize(("arguments", "parameter"), AT_ADMISSION, ids=shown)
async def test_wrong_arguments_are_refused_by_name(arguments: dict[str, Any], parameter: str, policy: str) -> None:
    async with letters_engine(policy=policy) as engine:
        async with engine.stream("companion", SamplingParams(max_tokens=20, seed=1)) as companion:
            await anext(companion)
            with pytest.raises(InvalidRequestError) as refused:
                await engine.generate(**({"prompt": "abc"} | arguments))
            assert refused.value.parameter == parameter
            assert parameter in str(refused.value)
            async for _ in companion:
                pass
            assert list(companion.result.token_ids) == answer("companion", 20, 1)
        await assert_serving(engine)


ODD_BUT_FINE: list[dict[str, Any]] = [
    {"prompt": (1, 2, 3)},
    {"prompt": range(5)},
    {"prompt": array("i", [1, 2])},
    {"params": SamplingParams(top_k=2**70, max_tokens=1)},
    {"params": SamplingParams(seed=2**63 - 1, n=3, max_tokens=1)},
    {"params": SamplingParams(stop="\ud800", max_tokens=1)},
    {"priority": -(10**30), "params": SamplingParams(max_tokens=1)},
    {"request_id": "\ud800", "params": SamplingParams(max_tokens=1)},
    {"deadline": 1e9, "params": SamplingParams(max_tokens=1)},
]


@pytest.mark.parametrize("arguments", ODD_BUT_FINE, ids=shown)
async def test_odd_values_that_mean_something_are_served(arguments: dict[str, Any]) -> None:
    async with letters_engine(policy="priority") as engine:
        arguments = {"prompt": "abc", "params": SamplingParams(max_tokens=1)} | arguments
        done = await engine.generate(**arguments)
        assert done.finish_reason == "length"


async def test_generate_many_refuses_what_is_no_list_of_prompts() -> None:
    async with letters_engine() as engine:
        for prompts in ("one text", 5, None):
            with pytest.raises(InvalidRequestError, match="prompts"):
                await engine.generate_many(prompts)  # type: ignore[arg-type]
        for limit in (0, -1, "many", True):
            with pytest.raises(InvalidRequestError, match="max_concurrent"):
                await engine.generate_many(["a"], max_concurrent=limit)  # type: ignore[arg-type]
        await assert_serving(engine)


async def test_a_prompt_is_never_in_the_message_of_a_length_error() -> None:
    async with letters_engine(cache={"num_blocks": 4}) as engine:
        with pytest.raises(ContextLengthError) as refused:
            await engine.generate("secret " * 100)
        assert "secret" not in str(refused.value)


async def assert_serving(engine: Engine) -> None:
    done = await engine.generate("still there?", SamplingParams(max_tokens=4, seed=3))
    assert list(done.token_ids) == answer("still there?", 4, 3)
    await wait_until_idle(engine)


@pytest.mark.row("X-POISON", "a row that fails ends alone with its reason")
async def test_a_poisoned_row_ends_alone() -> None:
    def poison(worker: Any) -> None:
        worker.row_error = lambda ids: "logits hold NaN" if bytes(ids[:6]) == b"poison" and len(ids) > 9 else None

    async with fake_engine(letters, settings(), on_worker=poison) as engine:
        async with engine.stream("companion", SamplingParams(max_tokens=30, seed=1)) as companion:
            await anext(companion)
            with pytest.raises(InferError, match="logits hold NaN"):
                await engine.generate("poison", SamplingParams(max_tokens=30))
            async for _ in companion:
                pass
        assert list(companion.result.token_ids) == answer("companion", 30, 1)
        await assert_serving(engine)


@pytest.mark.parametrize("use", [lambda stream: stream.result, lambda stream: stream.request_id])
async def test_a_stream_that_was_not_entered_says_so(use: Callable[[Any], Any]) -> None:
    async with letters_engine() as engine:
        stream = engine.stream("abc")
        with pytest.raises(InferError, match="async with"):
            use(stream)
        with pytest.raises(InferError, match="async with"):
            await anext(stream)
        async with engine.stream("abc", SamplingParams(max_tokens=3)) as stream:
            with pytest.raises(InferError, match="once"):
                await stream.__aenter__()
            async for _ in stream:
                pass
        with pytest.raises(InferError, match="once"):
            await stream.__aenter__()
        assert len(stream.result.token_ids) == 3
