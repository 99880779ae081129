"""Every architecture through the real engine against transformers' greedy answers: windows, rope scaling, chunks.
Random two-layer models in fp32, written as checkpoints and loaded as a user would."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infer.models import deepseek_v2, deepseek_v3

from .engine_support import (
    ARCHITECTURES,
    VOCAB,
    Oracle,
    assert_nothing_held,
    greedy,
    mostly_compared,
    parts_of,
    prompt,
    record,
    same_tokens,
    serve,
    spoil,
    write_checkpoint,
)

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 10.0, "original_max_position_embeddings": 64}
WINDOW = 32
DEEPSEEK_V2, DEEPSEEK_V3 = (
    module.EXAMPLE | {"vocab_size": VOCAB, "hidden_size": 64, "max_position_embeddings": 640}
    for module in (deepseek_v2, deepseek_v3)
)
MODELS: dict[str, dict[str, Any]] = {
    **ARCHITECTURES,
    "llama3-rope": ARCHITECTURES["llama"] | {"rope_scaling": LLAMA3_ROPE},
    "gemma3-32": ARCHITECTURES["gemma3"] | {"sliding_window": WINDOW},
    "mistral-32": ARCHITECTURES["mistral"] | {"sliding_window": WINDOW},
    "qwen3-yarn": ARCHITECTURES["qwen3"] | {"rope_scaling": YARN},
    "deepseek-v2": DEEPSEEK_V2 | {"q_lora_rank": None},
    "deepseek-v3-yarn": DEEPSEEK_V3 | {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
}
LENGTHS = (5, 130, 40, 77)
Made = tuple[Path, Oracle]
Make = Callable[[str], Made]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Make:
    known: dict[str, Made] = {}

    def make(name: str) -> Made:
        if name not in known:
            path = write_checkpoint(tmp_path_factory.mktemp(name), MODELS[name])
            known[name] = path, Oracle.random(MODELS[name])
        return known[name]

    return make


@pytest.mark.row("ENG-SCHED-CORE", "Llama, Mistral, Qwen2, Qwen3 and Gemma 3 give transformers' greedy tokens")
@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_equal_transformers(name: str, made: Make) -> None:
    """Mixed lengths together, the long ones in chunks, beyond every window."""
    path, oracle = made(name)
    prompts = [prompt(length) for length in LENGTHS]
    with serve(path) as engine:
        done = engine.generate_many(prompts, greedy(24))
        assert_nothing_held(engine)
    counts = [same_tokens(c.token_ids, oracle.greedy(p, 24)) for p, c in zip(prompts, done, strict=True)]
    mostly_compared(counts, 24 * len(LENGTHS))
    assert all(len(set(completion.token_ids)) > 4 for completion in done), "repeating one token proves little"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_comparison_notices_a_missing_rotation(name: str, made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    path, oracle = made(name)
    spoil(monkeypatch, lambda ops: {"rotary": lambda q, k, cos, sin: (q, k)})
    with serve(path) as engine:
        done = engine.generate(prompt(130), greedy(24))
    with pytest.raises(AssertionError):
        same_tokens(done.token_ids, oracle.greedy(prompt(130), 24))


def max_held(window: int, block: int) -> int:
    return -(-window // block) + 1


@pytest.mark.row(
    "KV-SLIDING-WINDOW-SPEC", "window 32, 500 tokens: the group never holds more than ceil(window/block)+1"
)
@pytest.mark.row("KV-SLIDING-WINDOW-SPEC", "tokens equal transformers (Gemma and Mistral config)")
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("name", "sliding"), [("gemma3-32", 1), ("mistral-32", 0)])
def test_five_hundred_tokens_through_a_window_of_32(name: str, sliding: int, depth: int, made: Make) -> None:
    """A prompt of 20 and 480 answers; a decode step holds the window's blocks and no more, whatever came before."""
    path, oracle = made(name)
    with serve(path, scheduler={"in_flight_depth": depth}) as engine:
        group = next(i for i, g in enumerate(engine.engine.resolved.cache.groups) if g.window == WINDOW)
        trace = record(engine)
        done = engine.generate(prompt(20), greedy(480))
        assert_nothing_held(engine)
    expected = oracle.greedy(prompt(20), 480)
    assert same_tokens(done.token_ids, expected) >= 100
    held = [in_use[group] for in_use in trace.in_use]
    assert len(held) == 480 and max(held) == max_held(WINDOW, 16)
    if len(trace.in_use[0]) > 1:  # the full-attention group beside it holds everything
        full = [in_use[1 - group] for in_use in trace.in_use]
        assert full[-1] == -(-499 // 16)


@pytest.mark.row("KV-SLIDING-WINDOW-SPEC", "prefix hits only when the last window of blocks is present")
def test_a_prefix_is_reused_only_with_its_last_window(made: Make) -> None:
    """A second request that goes on where the first ended hits; one that leaves it far behind the window, whose blocks
    were given to others since, computes them again. Both answer as transformers does."""
    path, oracle = made("gemma3-32")
    first = prompt(200)
    with serve(path, cache={"num_blocks": 60}) as engine:
        sliding = engine.engine.resolved.cache.groups
        assert {group.window for group in sliding} == {None, WINDOW}
        engine.generate(first, greedy(8))
        again = engine.generate([*first, *prompt(9, seed=4)], greedy(8))
        assert again.usage.cached_tokens == 192
        same_tokens(again.token_ids, oracle.greedy([*first, *prompt(9, seed=4)], 8))
        scheduler_kv = engine.engine._parts.scheduler.kv  # type: ignore[union-attr]
        pool = scheduler_kv.pools[next(i for i, g in enumerate(sliding) if g.window == WINDOW)]
        # Forget the contents of the sliding blocks alone: the full group still knows the whole prompt.
        pool.unregister([block for block in range(1, pool.num_blocks + 1) if pool._hashes[block] is not None])
        third = engine.generate([*first, *prompt(9, seed=5)], greedy(8))
        assert third.usage.cached_tokens == 0
        same_tokens(third.token_ids, oracle.greedy([*first, *prompt(9, seed=5)], 8))


@pytest.mark.row("KV-PREFIX-CACHE", "MLA models hit")
@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3-yarn"])
def test_a_latent_attention_model_reuses_a_prefix(name: str, made: Make) -> None:
    """Values are narrower than keys; blocks hold both, and the plan counts them exactly."""
    path, oracle = made(name)
    first, more = prompt(100), prompt(20, seed=4)
    with serve(path) as engine:
        assert engine.generate(first, greedy(8)).usage.cached_tokens == 0
        again = engine.generate([*first, *more], greedy(16))
        assert again.usage.cached_tokens == 96
        assert same_tokens(again.token_ids, oracle.greedy([*first, *more], 16)) > 12
        (group,) = engine.engine.resolved.cache.groups
        assert group.bytes_per_block == 2 * 16 * 4 * (12 + 10) * 4  # layers, tokens, heads, key and value size, fp32
        kept = parts_of(engine).executor._worker.measured()["kv_cache"]
        alignment = 64  # what the start of the one mapping may be moved by
        assert kept == engine.engine.resolved.memory.kv_cache + alignment


@pytest.mark.row("ATTN-SLIDING-WINDOW", "a prompt four times the window gives tokens equal to transformers on CPU")
@pytest.mark.parametrize("name", ["gemma3-32", "mistral-32"])
def test_a_prompt_four_times_the_window(name: str, made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    path, oracle = made(name)
    ids = prompt(4 * WINDOW)
    expected = oracle.greedy(ids, 32)
    with serve(path) as engine:
        assert same_tokens(engine.generate(ids, greedy(32)).token_ids, expected) > 16
    # The negative control: every position is seen.
    spoil(monkeypatch, lambda ops: {"attention": lambda *args: ops.attention(*args[:5], None, args[6])})
    with serve(path, cache={"prefix_caching": False}) as engine:
        wrong = engine.generate(ids, greedy(32)).token_ids
    with pytest.raises(AssertionError):
        same_tokens(wrong, expected)


@pytest.mark.row("ATTN-ROPE-LLAMA3", "tokens are equal")
def test_llama3_rope_scaling(made: Make, tmp_path: Path) -> None:
    """Beyond the original context, where all three bands of frequencies matter; without the scaling tokens differ."""
    path, oracle = made("llama3-rope")
    ids = prompt(300)
    expected = oracle.greedy(ids, 32)
    with serve(path) as engine:
        assert same_tokens(engine.generate(ids, greedy(32)).token_ids, expected) > 16
    plain = write_checkpoint(tmp_path, ARCHITECTURES["llama"])
    with serve(plain) as engine, pytest.raises(AssertionError):
        same_tokens(engine.generate(ids, greedy(32)).token_ids, expected)


def test_the_scaled_config_reaches_all_three_bands(made: Make) -> None:
    """Kept, blended and fully scaled frequencies all occur in the model above, or its tokens would prove less."""
    rotary = made("llama3-rope")[1].model.model.rotary_emb
    plain = made("llama")[1].model.model.rotary_emb
    ratio = rotary.inv_freq / plain.inv_freq
    assert (ratio > 0.999).any() and (ratio < 0.126).any() and ((ratio < 0.99) & (ratio > 0.13)).any()
