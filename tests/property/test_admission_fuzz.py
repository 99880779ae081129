"""Requests of any shape: a typed error or an answer, and healthy companions finish with the tokens of a solo run.
The control-plane part of X-POISON; 10,000 requests with `-m heavy`, 500 by default."""

from __future__ import annotations

import random
from array import array
from collections import deque
from typing import Any

import anyio
import pytest

from infer import InferError, SamplingParams
from infer.engine.engine import Engine
from infer.testing.fake_engine import fake_engine
from infer.testing.fake_executor import FakeWorker
from served import answer, letters, settings, wait_until_idle

pytestmark = pytest.mark.anyio

WILD: list[Any] = [
    None,
    True,
    0,
    -1,
    1,
    3.5,
    2**31,
    2**63,
    -(2**70),
    10**400,
    10**5000,
    float("nan"),
    float("inf"),
    "",
    "a",
    "\ud800",
    "x" * 5000,
    b"",
    b"abc",
    (),
    [],
    {},
    set(),
    [None],
    [[]],
    {"a": 1},
    object(),
    object,
    len,
    range(10**30),
    Exception("x"),
    complex(1, 2),
]
"""Values that fit almost nowhere."""

CONTENTS: list[Any] = ["hi", "", "\udfff", None, 5, ["x"], [{"type": "text", "text": "hi"}], {"text": "hi"}, object()]
ROLES: list[Any] = ["user", "system", "assistant", "tool", "", None, 7, "\ud800"]
SENSIBLE: dict[str, list[Any]] = {
    "max_tokens": [1, 2, 5, 17],
    "min_tokens": [0, 1, 3],
    "temperature": [0, 0.7, 100.0],
    "top_p": [0.5, 1.0],
    "top_k": [0, 5, 2**40],
    "min_p": [0.0, 1.0],
    "repetition_penalty": [1.0, 99.0],
    "frequency_penalty": [-2.0, 2.0],
    "presence_penalty": [0.5],
    "seed": [0, 2**63 - 1],
    "stop": ["a", ["b", "cc"], "\ud800", ["z"] * 64],
    "stop_token_ids": [(65,), (257, 0)],
    "include_stop": [True],
    "ignore_eos": [True],
    "logit_bias": [{5: 1.0}, {257: -100.0}],
    "allowed_token_ids": [(65, 66)],
    "bad_words": [("ab",), (" ",)],
    "logprobs": [0, 3, 258],
    "prompt_logprobs": [0, 2],
    "logprobs_mode": ["raw", "processed", "raw_logits", "processed_logits"],
    "logprob_token_ids": [(65, 66), (), (257,) * 9],
    "return_kept_set": [True],
    "forced_token_ids": [(65, 257, 66), (65,)],
    "routed_experts_prompt_start": [0, 1],
    "n": [1, 2, 8],
}


class Fuzzer:
    """Draws one call at a time from a seed."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)

    def wild(self) -> Any:
        return self.chance.choice(WILD)

    def ids(self) -> list[int]:
        return [self.chance.randrange(258) for _ in range(self.chance.choice([1, 5, 40, 200]))]

    def prompt(self) -> Any:
        chance, ids = self.chance, self.ids()
        kind = chance.randrange(16)
        if kind == 0:
            return self.wild()
        if kind == 1:
            ids[chance.randrange(len(ids))] = self.wild()
            return ids
        if kind == 2:
            return chance.choice([tuple, deque])(ids)
        if kind == 3:
            return array(chance.choice("ihq"), [token % 128 for token in ids])
        if kind == 4:
            return ids * chance.choice([1, 30])
        if kind <= 8:
            return self.messages()
        return bytes(token % 128 for token in ids).decode() + chance.choice(
            ["", "", "", "é", "\U0001f600", "\ud8ff", "\0", "."]
        )

    def messages(self) -> Any:
        chance = self.chance
        messages: list[Any] = []
        for _ in range(chance.randint(1, 4)):
            message: dict[Any, Any] = {"role": "user", "content": "hello"}
            if chance.random() < 0.2:
                message |= {"role": chance.choice(ROLES), "content": chance.choice(CONTENTS)}
            if chance.random() < 0.05:
                message[self.hashable()] = self.wild()
            if chance.random() < 0.05:
                del message[chance.choice(["role", "content"])]
            messages.append(message)
        if chance.random() < 0.1:
            messages.insert(chance.randrange(len(messages) + 1), self.wild())
        return messages

    def hashable(self) -> Any:
        value = self.wild()
        return value if isinstance(value, str | int | float) else "extra"

    def params(self) -> Any:
        chance = self.chance
        if chance.random() < 0.05:
            return self.wild()
        names = chance.sample(list(SENSIBLE), chance.choice([0, 1, 2, 4, 8]))
        values: dict[str, Any] = {"max_tokens": 3} | {name: chance.choice(SENSIBLE[name]) for name in names}
        if chance.random() < 0.15:
            values[chance.choice([*SENSIBLE, "unheard_of"])] = self.wild()
        return values

    def options(self) -> dict[str, Any]:
        chance, options = self.chance, dict[str, Any]()
        for name in ("request_id", "priority", "cache_salt", "artifact", "lora", "tools", "deadline"):
            if chance.random() < 0.04:
                options[name] = self.wild()
        return options


async def poisoned_call(engine: Engine, fuzzer: Fuzzer) -> bool:
    """One wild request; True if it was served. Anything but a typed error fails the test."""
    prompt, values, options = fuzzer.prompt(), fuzzer.params(), fuzzer.options()
    try:
        params = SamplingParams(**values) if isinstance(values, dict) and all(map(is_text, values)) else values
        with anyio.fail_after(120):
            await engine.generate(prompt, params, **options)
    except InferError as error:
        assert str(error)
        return False
    return True


def is_text(name: object) -> bool:
    return isinstance(name, str)


async def fuzz(count: int, seed: int) -> None:
    def poison(worker: FakeWorker) -> None:
        worker.row_error = lambda ids: (
            "drawn from NaN" if len(ids) % 41 == 40 and ids[-1] % 3 == 0 and ids[0] == 1 else None
        )

    config = settings(policy="priority", max_num_seqs=12, max_num_batched_tokens=64, cache={"num_blocks": 80})
    async with fake_engine(letters, config, max_position=1024, on_worker=poison) as engine:
        fuzzer, served = Fuzzer(seed), 0
        healthy = 0

        async def companion(number: int) -> None:
            nonlocal healthy
            prompt = f"companion {number}"
            while not done.is_set():
                result = await engine.generate(prompt, SamplingParams(max_tokens=25, seed=number))
                assert list(result.token_ids) == answer(prompt, 25, number)
                healthy += 1

        async def attacker(calls: int) -> None:
            nonlocal served
            for _ in range(calls):
                answered = await poisoned_call(engine, fuzzer)
                served += answered

        done = anyio.Event()
        async with anyio.create_task_group() as tasks:
            for number in range(3):
                tasks.start_soon(companion, number)
            async with anyio.create_task_group() as attackers:
                for _ in range(5):
                    attackers.start_soon(attacker, count // 5)
            done.set()
        assert engine.is_alive
        assert healthy >= 3
        assert count * 0.15 < served < count * 0.95, f"{served} of {count} were served: the fuzz is one-sided"
        await wait_until_idle(engine)


@pytest.mark.row("X-POISON", "fuzzed requests: typed errors only, every companion finishes with its solo tokens (500)")
async def test_fuzzed_requests_hurt_nobody() -> None:
    await fuzz(500, seed=1)


@pytest.mark.heavy
@pytest.mark.row("X-POISON", "10,000 fuzzed requests, every healthy companion finishes with its solo tokens")
async def test_ten_thousand_fuzzed_requests_hurt_nobody() -> None:
    await fuzz(10_000, seed=2)
