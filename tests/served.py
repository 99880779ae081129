"""Engines over a scripted model for tests of the facade, and what one request alone would answer.
For tests; every engine here is the real facade, loop and scheduler over the fake executor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio

from infer import EngineConfig
from infer.config.model import GenerationDefaults
from infer.engine.engine import Engine
from infer.engine.step import SamplingSpec
from infer.testing.fake_engine import EOS, fake_engine
from infer.testing.fake_executor import hashed_token

_hashed = hashed_token(95)


def letters(token_ids: Sequence[int], sampling: SamplingSpec) -> int:
    """A printable character that depends on every token before it and on the seed."""
    return 32 + _hashed(token_ids, sampling)


def answer(prompt: str | Sequence[int], count: int, seed: int) -> list[int]:
    """The ids that `letters` gives to a prompt that is served alone."""
    known = list(prompt.encode()) if isinstance(prompt, str) else list(prompt)
    start = len(known)
    for _ in range(count):
        known.append(letters(known, SamplingSpec(seed=seed)))
    return known[start:]


def answer_text(prompt: str | Sequence[int], count: int, seed: int) -> str:
    return bytes(answer(prompt, count, seed)).decode()


def settings(*, cache: dict[str, Any] | None = None, **scheduler: Any) -> EngineConfig:
    return EngineConfig(scheduler=scheduler, cache={"num_blocks": 200} | (cache or {}))


def letters_engine(
    *, cache: dict[str, Any] | None = None, generation: GenerationDefaults | None = None, **scheduler: Any
) -> Engine:
    return fake_engine(letters, settings(cache=cache, **scheduler), generation=generation)


class Script:
    """Answers `ids` one after the other, whatever the prompt, then EOS."""

    def __init__(self, ids: Sequence[int] | str) -> None:
        self.ids = list(ids.encode()) if isinstance(ids, str) else list(ids)
        self.prompt_len: int | None = None

    def __call__(self, token_ids: Sequence[int], sampling: SamplingSpec) -> int:
        if self.prompt_len is None:
            self.prompt_len = len(token_ids)
        index = len(token_ids) - self.prompt_len
        return self.ids[index] if index < len(self.ids) else EOS


async def wait_until_idle(engine: Engine, checkpoints: int = 200) -> None:
    """Fails unless the engine frees everything soon."""
    for _ in range(checkpoints):
        now = engine.statistics()
        if not (now.running or now.waiting or now.kv_usage):
            return
        await anyio.lowlevel.checkpoint()
    raise AssertionError(f"the engine still holds something: {engine.statistics()}")
