"""Engines over a random checkpoint, the load they are given, and what two of them must agree in. Public API only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from gpu.checkpoints import RandomCheckpoint
from gpu.place import Place
from infer import Completion, Engine, EngineConfig, SamplingParams
from infer.engine.blocking import BlockingEngine

NEAR_TIE = 0.05
"""Natural log. Where products are rounded to bf16 in another order, a token may change whose rival was that close."""
Prompts = list[list[int]]


@contextmanager
def engine(place: Place, checkpoint: RandomCheckpoint, **sections: dict[str, Any]) -> Iterator[BlockingEngine]:
    """Sections are merged over: this run's platform, no tokenizer, as many slots and blocks as its sizes say."""
    chosen: dict[str, dict[str, Any]] = {
        "model": {"ref": str(checkpoint.path), "skip_tokenizer": True},
        "platform": {"name": place.platform},
        "numerics": {"mode": "invariant"},
        "scheduler": {"max_num_seqs": place.sizes.max_num_seqs},
        "cache": {"num_blocks": place.sizes.cache_blocks},
        "plugins": {"allow": ()},
    }
    for name, values in sections.items():
        chosen[name] = chosen.get(name, {}) | values
    if place.dry_run:
        chosen["platform"]["threads"] = 1
    config = EngineConfig(**chosen)
    with Engine.blocking(config) as opened:
        yield opened


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that come and go: prompts and answers of different lengths, more of them than there are slots."""

    prompts: Prompts
    params: tuple[SamplingParams, ...]


def mixed_load(place: Place, checkpoint: RandomCheckpoint, **params: Any) -> Load:
    """Batches of every size occur, from one to all slots. The first prompts begin alike, for the prefix cache."""
    sizes, generator = place.sizes, torch.Generator().manual_seed(7)
    vocab = checkpoint.settings["vocab_size"]
    prompts, settings = [], []
    shared = torch.randint(3, vocab, (sizes.prompt_len // 2,), generator=generator).tolist()
    for i in range(sizes.num_requests):
        length = 1 + int(torch.randint(sizes.prompt_len, (1,), generator=generator))
        own = torch.randint(3, vocab, (length,), generator=generator).tolist()
        prompts.append([*shared, *own] if i % 3 == 0 else own)
        settings.append(greedy(1 + (7 * i + 5) % sizes.max_tokens, **params))
    return Load(prompts, tuple(settings))


def random_prompts(checkpoint: RandomCheckpoint, count: int, length: int, seed: int = 0) -> Prompts:
    generator = torch.Generator().manual_seed(seed)
    ids: Prompts = torch.randint(3, checkpoint.settings["vocab_size"], (count, length), generator=generator).tolist()
    return ids


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, "logprobs": 2} | more))


def answers(place: Place, checkpoint: RandomCheckpoint, load: Load, **sections: dict[str, Any]) -> list[Completion]:
    """Of an engine of its own, all requests together."""
    with engine(place, checkpoint, **sections) as opened:
        return opened.generate_many(load.prompts, list(load.params))


def same_bits(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    """Tokens and log-probabilities, to the last bit. Raises `AssertionError` for the first request that differs."""
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        for place, (a, b) in enumerate(zip(scores(one), scores(other), strict=True)):
            assert a == b, f"request {number}, output token {place}: {a} and {b}"


def scores(done: Completion) -> list[tuple[int, float]]:
    return [(entry.token_id, entry.logprob) for entry in done.logprobs or ()]


def same_but_for_near_ties(found: Sequence[Completion], expected: Sequence[Completion]) -> dict[str, float]:
    """Where the arithmetic may differ in the last bits: the first token that differs must have had its rival that close, and
    what comes behind it is another text. -> the largest difference of a log-probability before that, and how many parted."""
    largest, parted = 0.0, 0
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        for place, (a, b) in enumerate(zip(one.logprobs or (), other.logprobs or (), strict=True)):
            if a.token_id != b.token_id:
                gap = a.logprob - dict(a.top).get(b.token_id, -math.inf)
                assert gap <= NEAR_TIE, f"request {number}, output token {place}: {a} and {b}, {gap:.3f} apart"
                parted += 1
                break
            largest = max(largest, abs(a.logprob - b.logprob))
    return {"largest_logprob_difference": largest, "requests_that_parted": parted}
