"""Through the real engine: the order of the queue changes no token and finds more in the cache; greedy loops end where the
definition says. Random tiny Llama in fp32, which loops by itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from infer import RepetitionDetection, SamplingParams

from .engine_support import ARCHITECTURES, assert_nothing_held, greedy, parts_of, prompt, serve, write_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), ARCHITECTURES["llama"])


@pytest.mark.row(
    "ENG-SGLANG-BEHAVIOR-FLAG", "per-request tokens are identical with the order on and off while total hit tokens rise"
)
def test_the_order_of_the_queue(model: Path) -> None:
    conversations = [prompt(96, seed=i) for i in range(4)]
    prompts = [conversations[i % 4] + prompt(10, seed=100 + i) for i in range(20)]
    params = [SamplingParams(max_tokens=8, seed=i, ignore_eos=True) for i in range(20)]
    tokens, hits = {}, {}
    for policy in ("fcfs", "longest_prefix"):
        scheduler = {"policy": policy, "max_num_seqs": 2}
        with serve(model, scheduler=scheduler, cache={"num_blocks": 16, "watermark": 0.0}) as engine:
            done = engine.generate_many(prompts, params, max_concurrent=20)
            tokens[policy] = [completion.token_ids for completion in done]
            hits[policy] = parts_of(engine).scheduler.kv.stats.hit
            assert_nothing_held(engine)
    assert tokens["fcfs"] == tokens["longest_prefix"]
    assert hits["longest_prefix"] > 1.5 * hits["fcfs"]


def first_loop(tokens: Sequence[int], rule: RepetitionDetection) -> int | None:
    """Tokens up to the first that completes a loop, by the definition."""
    for end in range(1, len(tokens) + 1):
        for size in range(rule.min_pattern_size, rule.max_pattern_size + 1):
            tail = list(tokens[max(0, end - size * rule.min_count) : end])
            if len(tail) == size * rule.min_count and tail == tail[:size] * rule.min_count:
                return end
    return None


@pytest.mark.row("SAMPLE-REPETITION", "stops on exactly the predicted token, and sampled text never triggers it")
@pytest.mark.parametrize("depth", [1, 2])
def test_a_model_that_loops(model: Path, depth: int) -> None:
    rule = RepetitionDetection(max_pattern_size=40, min_count=3)
    prompts = [prompt(10 + i, seed=i) for i in range(6)]
    with serve(model, scheduler={"in_flight_depth": depth}) as engine:
        whole = engine.generate_many(prompts, greedy(300))
        watched = engine.generate_many(prompts, greedy(300, repetition_detection=rule))
        sampled = SamplingParams(max_tokens=300, seed=5, ignore_eos=True, repetition_detection=rule)
        free = engine.generate_many(prompts, sampled)
        assert_nothing_held(engine)
    ends = [first_loop(completion.token_ids, rule) for completion in whole]
    assert any(ends), "no answer loops: nothing was tested"
    for plain, done, end in zip(whole, watched, ends, strict=True):
        assert done.token_ids == plain.token_ids[:end]
        assert done.finish_reason == ("length" if end is None else "repetition")
    assert [completion.finish_reason for completion in free] == ["length"] * len(prompts)
