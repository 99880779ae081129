"""Requests that cannot be served: each a typed error that names parameter and value, or an end of its own; companions
answer as if they were alone. The real worker on a random tiny Llama."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from infer import (
    Completion,
    ContextLengthError,
    Engine,
    InferError,
    InvalidRequestError,
    RequestError,
    SamplingParams,
    StepError,
)
from infer.engine.step import SamplingSpec, SlotAdmission, StepPlan

from .engine_support import (
    ARCHITECTURES,
    VOCAB,
    Oracle,
    assert_nothing_held,
    engine_config,
    greedy,
    parts_of,
    prompt,
    same_tokens,
    write_checkpoint,
)

HEALTHY = prompt(30)
Ask = Callable[[Engine], Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), ARCHITECTURES["llama"])


def ask(text: Any = HEALTHY, *, options: dict[str, Any] | None = None, **params: Any) -> Ask:
    """A request, its parameters made inside, so that a refusal of either is seen."""
    return lambda engine: engine.generate(text, SamplingParams(**({"max_tokens": 4} | params)), **(options or {}))


def chat(*messages: Any) -> Ask:
    return ask(list(messages))


BAD: dict[str, tuple[Ask, type[InferError], str, str]] = {
    "template that raises": (chat({"role": "refuse", "content": "x"}), InvalidRequestError, "messages", "no such role"),
    "empty chat": (ask([]), InvalidRequestError, "prompt", "empty"),
    "message that is no object": (
        chat({"role": "user", "content": "x"}, 7),
        InvalidRequestError,
        "messages",
        "messages[1]",
    ),
    "prompt as long as the context": (ask(prompt(640)), ContextLengthError, "prompt", "640"),
    "prompt longer than the context": (ask("word " * 2000), ContextLengthError, "prompt", "640"),
    "prompt and answer too long": (ask(max_tokens=611), ContextLengthError, "max_tokens", "611"),
    "empty text": (ask(""), InvalidRequestError, "prompt", "empty"),
    "id beyond the vocabulary": (ask([5, VOCAB]), InvalidRequestError, "prompt", str(VOCAB)),
    "negative id": (ask([5, -1]), InvalidRequestError, "prompt", "-1"),
    "huge id": (ask([2**70]), InvalidRequestError, "prompt", str(2**70)),
    "id that is no integer": (ask([5, 1.5]), InvalidRequestError, "prompt", "1.5"),
    "id that is a truth value": (ask([True]), InvalidRequestError, "prompt", "True"),
    "prompt of another kind": (ask(12), InvalidRequestError, "prompt", "int"),
    "bytes": (ask(b"abc"), InvalidRequestError, "prompt", "bytes"),
    "half a character": (ask("\ud800"), InvalidRequestError, "prompt", "Unicode"),
    "max_tokens=0": (ask(max_tokens=0), InvalidRequestError, "max_tokens", "0"),
    "negative max_tokens": (ask(max_tokens=-3), InvalidRequestError, "max_tokens", "-3"),
    "min over max": (ask(min_tokens=9, max_tokens=8), InvalidRequestError, "min_tokens", "min_tokens=9"),
    "unknown field": (ask(temprature=1.0), InvalidRequestError, "temprature", "temprature"),
    "temperature": (ask(temperature=-0.5), InvalidRequestError, "temperature", "-0.5"),
    "temperature not a number": (ask(temperature=float("nan")), InvalidRequestError, "temperature", "nan"),
    "top_p": (ask(top_p=0.0), InvalidRequestError, "top_p", "0.0"),
    "top_k": (ask(top_k=-1), InvalidRequestError, "top_k", "-1"),
    "n=0": (ask(n=0), InvalidRequestError, "n", "0"),
    "n beyond the slots": (ask(n=9), InvalidRequestError, "n", "9"),
    "seed": (ask(seed=2**63), InvalidRequestError, "seed", str(2**63)),
    "no allowed id": (ask(allowed_token_ids=()), InvalidRequestError, "allowed_token_ids", "empty"),
    "allowed id": (ask(allowed_token_ids=(VOCAB,)), InvalidRequestError, "allowed_token_ids", str(VOCAB)),
    "biased id": (ask(logit_bias={VOCAB + 1: 1.0}), InvalidRequestError, "logit_bias", str(VOCAB + 1)),
    "bias": (ask(logit_bias={3: 101.0}), InvalidRequestError, "logit_bias", "101"),
    "stop id": (ask(stop_token_ids=(9999,)), InvalidRequestError, "stop_token_ids", "9999"),
    "empty stop": (ask(stop=""), InvalidRequestError, "stop", "stop"),
    "half a character as bad word": (ask(bad_words=("\ud800",)), InvalidRequestError, "bad_words", "Unicode"),
    "empty bad word": (ask(bad_words=("",)), InvalidRequestError, "bad_words", "empty"),
    "logprobs": (ask(logprobs=VOCAB + 1), InvalidRequestError, "logprobs", str(VOCAB + 1)),
    "prompt_logprobs": (ask(prompt_logprobs=-1), InvalidRequestError, "prompt_logprobs", "-1"),
    "mode": (ask(logprobs_mode="cooked"), InvalidRequestError, "logprobs_mode", "cooked"),
    "deadline": (ask(options={"deadline": -1}), InvalidRequestError, "deadline", "-1"),
    "request_id": (ask(options={"request_id": ""}), InvalidRequestError, "request_id", "''"),
    "tools with raw text": (ask("x", options={"tools": [{"type": "function"}]}), InvalidRequestError, "tools", "tools"),
    "a feature of later": (ask(options={"lora": "x"}), InvalidRequestError, "lora", "lora"),
    "params of another kind": (lambda e: e.generate(HEALTHY, {"n": 1}), InvalidRequestError, "params", "dict"),
}


def test_each_bad_request_names_its_parameter_and_value(model: Path) -> None:
    """All of them one after the other at the same engine, which serves as before at the end, and holds nothing."""

    async def main() -> None:
        async with Engine(engine_config(model)) as engine:
            before = await engine.generate(HEALTHY, greedy(8))
            for name, (request, kind, parameter, value) in BAD.items():
                with pytest.raises(kind) as caught:
                    await request(engine)
                assert type(caught.value) is kind, name
                assert caught.value.parameter == parameter, name
                assert value in str(caught.value), name
                assert engine._requests == {}, name
            assert_nothing_held(engine)
            assert engine.statistics().finished_requests == 1  # none of them reached the scheduler
            assert (await engine.generate(HEALTHY, greedy(8))).token_ids == before.token_ids

    anyio.run(main)


def test_a_name_in_use_is_refused_and_the_first_goes_on(model: Path) -> None:
    async def main() -> None:
        async with Engine(engine_config(model)) as engine, engine.stream(HEALTHY, greedy(20), request_id="a") as stream:
            with pytest.raises(InvalidRequestError, match="'a' is running already"):
                await engine.generate(HEALTHY, greedy(2), request_id="a")
            async for _ in stream:
                pass
            assert len(stream.result.token_ids) == 20

    anyio.run(main)


# -- poison ------------------------------------------------------------------------------------------------------------


def fuzzed(draw: random.Random) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """A request that is wrong in about half of the cases, small when it is not."""
    good = [lambda: [draw.randrange(VOCAB) for _ in range(draw.choice([1, 2, 15, 16, 17, 40]))]]
    text = draw.choice(
        [
            *good * 7,
            lambda: [draw.choice([-1, VOCAB, 2**31, 2**80, 3]) for _ in range(draw.randrange(1, 4))],
            lambda: "".join(chr(draw.choice([10, 97, 233, 0x4E2D, 0x1F600])) for _ in range(draw.randrange(0, 12))),
            lambda: draw.choice(["", "\ud83d", "\x00", "<s></s><pad>", None, 7, [], [[]], ["a"], {"role": "user"}]),
            lambda: [
                {"role": draw.choice(["user", "refuse", "", None]), "content": draw.choice(["hi", "", None, 5, []])}
            ],
            lambda: prompt(draw.choice([639, 640, 5000])),
        ]
    )()
    params: dict[str, Any] = {"max_tokens": draw.randrange(1, 6), "seed": draw.randrange(2**63)}
    for name, choices in FIELDS.items():
        if draw.random() < 0.06:
            params[name] = draw.choice(choices)
    options: dict[str, Any] = {}
    for name, values in OPTIONS.items():
        if draw.random() < 0.05:
            options[name] = draw.choice(values)
    return text, params, options


NAN, INF = float("nan"), float("inf")
FIELDS: dict[str, list[Any]] = {
    "max_tokens": [0, -1, 1, 3, 10**9, 2**70, "5", None, True],
    "min_tokens": [0, 1, 4, 50, -2],
    "temperature": [0, 1e-9, 1e-4, 100, 101, -1, NAN, INF, "hot", None],
    "top_p": [0, 1e-12, 0.5, 1, 1.5, NAN],
    "top_k": [0, 1, 7, 10**9, 2**63, -1, 1.5],
    "min_p": [0, 1e-9, 1, 2, NAN],
    "repetition_penalty": [0, 1e-30, 0.5, 100, 1e30, INF],
    "frequency_penalty": [-2, 2, 3, NAN],
    "presence_penalty": [-2, 2, -3, INF],
    "seed": [0, -1, 2**63 - 1, 2**63, None],
    "stop": [(), ("a",), ("",), "x" * 1025, ("a",) * 65, ("\ud800",), 5],
    "stop_token_ids": [(1,), (VOCAB,), (-1,), (2**31,), ("a",)],
    "include_stop": [True, "maybe"],
    "logit_bias": [{5: 100.0}, {5: -100.0}, {VOCAB: 1.0}, {-1: 1.0}, {5: NAN}, {5: 1e9}, {"x": 1}],
    "allowed_token_ids": [(), (3,), (VOCAB,), (3, 3, 3), tuple(range(VOCAB)), (2,)],
    "bad_words": [("",), ("a", "b"), ("\ud800",), ("the quick",), tuple("abcdefghij")],
    "logprobs": [0, 1, VOCAB, VOCAB + 1, -1, 2**40],
    "prompt_logprobs": [0, 1, VOCAB, 10**9, -1],
    "logprobs_mode": ["raw", "raw_logits", "processed_logits", "none"],
    "n": [1, 2, 8, 9, 1025, 0, -1],
    "unknown": [1],
}
OPTIONS: dict[str, list[Any]] = {
    "priority": [0, -5, 2**70],
    "cache_salt": ["", "a", "\u0000"],
    "deadline": [0, -1, NAN, INF, 1e-9, 1e6, "soon", True],
    "tools": [[], [{}], [{"type": "function"}]],
    "request_id": ["", "twin", 7],
    "artifact": [{}],
}


def plant_worker_poison(engine: Engine, draw: random.Random) -> Counter[str]:
    """What admission let through may still be rotten: now and then an admitted row of a fuzzed request (they alone have
    odd seeds of 62 bits) reaches the worker with a setting or an id that it cannot take."""
    planted: Counter[str] = Counter()
    executor = parts_of(engine).executor
    submit = executor.submit
    rotten: dict[str, dict[str, Any]] = {
        "temperature": {"temperature": NAN},
        "id": {"allowed_token_ids": (VOCAB + 7,)},
        "bias": {"logit_bias": ((3, INF),)},
        "everything forbidden": {"logit_bias": tuple((i, -INF) for i in range(VOCAB))},
        "word": {"bad_words": ((1, 10**6),)},
    }

    def spoil(admission: SlotAdmission) -> None:
        name = draw.choice([*rotten, "token"])
        planted[name] += 1
        if name == "token":
            admission.token_ids[0] = draw.choice([-1, VOCAB, 2**40])
            return
        spec = admission.sampling
        fields = {field: getattr(spec, field) for field in spec.__struct_fields__}
        admission.sampling = SamplingSpec(**(fields | rotten[name]))

    def poisoned(plan: StepPlan) -> Any:
        for admission in plan.admissions:
            if admission.prompt_len != len(HEALTHY) and draw.random() < 0.1:
                spoil(admission)
        return submit(plan)

    executor.submit = poisoned
    return planted


async def poison(model: Path, count: int, seed: int) -> tuple[Counter[str], Counter[str], list[Completion]]:
    """`count` fuzzed requests by four tasks, while two others keep asking the healthy question."""
    draw = random.Random(seed)
    outcomes: Counter[str] = Counter()
    healthy: list[Completion] = []
    left = count

    async with Engine(engine_config(model, cache={"num_blocks": 60})) as engine:
        planted = plant_worker_poison(engine, draw)

        async def strangers() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                text, params, options = fuzzed(draw)
                try:
                    done = await engine.generate(text, SamplingParams(**params), **options)
                    outcomes[done.finish_reason] += 1
                except (RequestError, StepError) as error:
                    outcomes[type(error).__name__] += 1
                    await anyio.lowlevel.checkpoint()  # a refusal waits for nothing

        async def companion(index: int) -> None:
            while left > 0:
                salt = f"{index}-{len(healthy)}"  # nobody's blocks but its own
                healthy.append(await engine.generate(HEALTHY, greedy(16), cache_salt=salt))
                healthy.append(await engine.generate(HEALTHY, greedy(16)))

        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(strangers)
            for index in range(2):
                tasks.start_soon(companion, index)
        assert engine.is_alive and engine._requests == {}
        with anyio.fail_after(60):
            while parts_of(engine).scheduler.num_unfinished:  # noqa: ASYNC110 - the engine's own state
                await anyio.sleep(0.001)
        assert_nothing_held(engine)
        healthy.append(await engine.generate(HEALTHY, greedy(16)))
    return outcomes, planted, healthy


def check_poison(model: Path, count: int, seed: int) -> None:
    async def alone() -> Completion:
        async with Engine(engine_config(model)) as engine:
            return await engine.generate(HEALTHY, greedy(16))

    solo = anyio.run(alone)
    same_tokens(solo.token_ids, Oracle.random(ARCHITECTURES["llama"]).greedy(HEALTHY, 16))
    outcomes, planted, healthy = anyio.run(poison, model, count, seed)
    assert outcomes.total() == count
    assert all(completion.token_ids == solo.token_ids for completion in healthy) and len(healthy) > count // 100
    # Both kinds of end were seen, and what the worker was given to choke on ended as a failed step of its own.
    assert outcomes["length"] > count // 20 and outcomes["InvalidRequestError"] > count // 4
    assert outcomes["ContextLengthError"] and outcomes["SamplingError"]
    assert planted.total() >= outcomes["SamplingError"] and not outcomes["StepError"]


@pytest.mark.row("X-POISON", "500 fuzzed requests, every healthy companion finishes with its solo tokens")
def test_fuzzed_requests_hurt_nobody(model: Path) -> None:
    check_poison(model, 500, seed=1)


@pytest.mark.heavy
@pytest.mark.row("X-POISON", "10,000 fuzzed requests, every healthy companion finishes with its solo tokens")
def test_ten_thousand_fuzzed_requests_hurt_nobody(model: Path) -> None:
    check_poison(model, 10_000, seed=2)
