"""Prefix reuse through the real engine: the same tokens as without, hits as an independent count expects them, salts.
Random tiny Llama in fp32; requests run one after the other unless a test says otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest

from infer import Engine, SamplingParams

from .engine_support import (
    ARCHITECTURES,
    Oracle,
    engine_config,
    greedy,
    ids,
    prompt,
    record,
    same_tokens,
    serve,
    write_checkpoint,
)

BLOCK = 16
SHARED = prompt(100, seed=21)
CORPUS: list[list[int]] = [
    SHARED,
    [*SHARED[:90], *prompt(30, seed=1)],
    SHARED[:48],  # a whole number of blocks: its last token is computed all the same
    [*SHARED[:48], *prompt(1, seed=2)],
    prompt(70, seed=3),
    [*prompt(70, seed=3), *prompt(20, seed=4)],
    SHARED,
    SHARED[:15],
    [*SHARED[1:], 9],  # the same tokens one position later share nothing
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), ARCHITECTURES["llama"])


def shared_blocks(token_ids: Sequence[int], computed: list[list[int]]) -> int:
    """Block-aligned length of the longest common beginning with anything computed before; one token is always left."""
    best = 0
    for other in computed:
        common = next((i for i, (a, b) in enumerate(zip(token_ids, other, strict=False)) if a != b), None)
        common = min(len(token_ids), len(other)) if common is None else common
        best = max(best, min(common, len(token_ids) - 1) // BLOCK * BLOCK)
    return best


@pytest.mark.row("KV-PREFIX-CACHE", "cache-on tokens equal cache-off tokens on a repeated-prefix corpus")
@pytest.mark.row("KV-PREFIX-CACHE", "hit tokens equal the block-aligned shared length of an independent function")
@pytest.mark.row("KV-PREFIX-CACHE", "statistics are on by default")
@pytest.mark.row("KV-SGLANG-RADIX-CACHE", "a shared prefix is computed once and answers do not change")
def test_reuse_changes_no_token_and_counts_exactly(model: Path) -> None:
    sampled = SamplingParams(seed=5, max_tokens=12, ignore_eos=True, logprobs=0)
    with serve(model, cache={"prefix_caching": False}) as engine:
        plain = [engine.generate(p, params) for p in CORPUS for params in (greedy(12), sampled)]
        assert all(c.usage.cached_tokens == 0 for c in plain)
        assert engine.engine.statistics().prefix_hit_tokens == 0
    with serve(model) as engine:
        trace = record(engine)
        computed: list[list[int]] = []
        cached = []
        for token_ids in CORPUS:
            for params in (greedy(12), sampled):
                before = trace.num_tokens
                done = engine.generate(token_ids, params)
                expected = shared_blocks(token_ids, computed)
                assert done.usage.cached_tokens == expected
                assert trace.num_tokens - before == len(token_ids) - expected + 11
                computed.append([*token_ids, *done.token_ids[:-1]])  # the last token is never computed
                cached.append(done)
        hits = sum(c.usage.cached_tokens for c in cached)
        assert engine.engine.statistics().prefix_hit_tokens == hits > 600
        assert engine.engine.statistics().prefix_queried_tokens >= hits
    assert ids(cached) == ids(plain)
    for mine, other in zip(cached, plain, strict=True):
        for entry, reference in zip(mine.logprobs or (), other.logprobs or (), strict=True):
            assert entry.logprob == pytest.approx(reference.logprob, abs=1e-5)


@pytest.mark.row("KV-PREFIX-CACHE", "cache-on tokens equal cache-off tokens on a repeated-prefix corpus")
def test_reuse_under_load_answers_as_transformers(model: Path) -> None:
    oracle = Oracle.random(ARCHITECTURES["llama"])
    with serve(model, cache={"num_blocks": 40}) as engine:
        done = engine.generate_many([*CORPUS, *CORPUS], greedy(16), max_concurrent=18)
        assert engine.engine.statistics().prefix_hit_tokens > 0
    for token_ids, completion in zip([*CORPUS, *CORPUS], done, strict=True):
        same_tokens(completion.token_ids, oracle.greedy(token_ids, 16))


@pytest.mark.row("KV-PREFIX-CACHE", "different cache_salt shares 0 tokens")
def test_salts_share_nothing(model: Path) -> None:
    with serve(model) as engine:
        answers = {}
        for salt, expected in ((None, 0), ("a", 0), ("b", 0), ("a", 96), (None, 96)):
            done = engine.generate(SHARED, greedy(8), cache_salt=salt)
            assert done.usage.cached_tokens == expected, salt
            answers[salt] = done.token_ids
    assert len(set(answers.values())) == 1


def test_a_reset_forgets(model: Path) -> None:
    async def main() -> None:
        async with Engine(engine_config(model)) as engine:
            await engine.generate(SHARED, greedy(4))
            async with engine.stream(prompt(20), greedy(400)) as stream:
                await anext(stream)
                assert not await engine.reset_prefix_cache()  # refused: blocks are in use
            assert (await engine.generate(SHARED, greedy(4))).usage.cached_tokens == 96
            assert await engine.reset_prefix_cache()
            assert (await engine.generate(SHARED, greedy(4))).usage.cached_tokens == 0

    anyio.run(main)


def test_different_weights_share_nothing(model: Path, tmp_path: Path) -> None:
    """The chain begins with the model's identity: another checkpoint of the same shape has other hashes."""
    other = write_checkpoint(tmp_path, ARCHITECTURES["llama"], seed=1)
    roots = []
    for path in (model, other):
        with serve(path) as engine:
            parts = engine.engine._parts
            assert parts is not None
            roots.append(parts.scheduler.kv._root)
    assert roots[0] != roots[1]
