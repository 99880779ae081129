"""Penalties and random numbers of a platform's own: the same tokens as without them, and transformers' processed logits."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

import sampling_kernels
from infer.engine.sampling.row import NEEDS_COUNTS
from infer.engine.sampling.sampler import SHAPING, process, sample, with_penalties
from infer.engine.step import SamplingSpec
from unit.engine.sampling.settings import oracle, random_case, row_of

VOCAB = 61


def logits_of(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4


def test_processed_logits_are_those_of_transformers() -> None:
    rng = random.Random(5)
    cases = [random_case(rng, VOCAB) for _ in range(80)]
    rows = [row_of(*case, VOCAB) for case in cases]
    assert sum(bool(row.features & NEEDS_COUNTS) for row in rows) > 30
    logits = logits_of(len(cases))
    found = logits.clone()
    process(found, rows, with_penalties(sampling_kernels.penalties))
    for (spec, ids, prompt_len), own, raw in zip(cases, found, logits, strict=True):
        torch.testing.assert_close(own, oracle(spec, ids, prompt_len, raw), rtol=1e-5, atol=1e-5)


def test_penalties_stand_where_they_stood() -> None:
    features = [feature for feature, _ in with_penalties(sampling_kernels.penalties)]
    before = [feature for feature, _ in SHAPING]
    first = features.index(NEEDS_COUNTS)
    assert features == [*before[:first], NEEDS_COUNTS, *before[first + 2 :]]
    assert before[first] | before[first + 1] == NEEDS_COUNTS


def test_tokens_are_the_same_with_a_platforms_kernels() -> None:
    rng = random.Random(6)
    rows = [row_of(*random_case(rng, VOCAB), VOCAB) for _ in range(64)]
    rows += [row_of(SamplingSpec(seed=2**64 - 1 - i, temperature=0.8, top_p=0.9), [1, 2], 1, VOCAB) for i in range(16)]
    logits, asked = logits_of(len(rows), 1), []

    def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
        asked.append(len(seeds))
        return sampling_kernels.uniforms(seeds, positions)

    def fused(logits: Tensor, index: Tensor, *settings: Tensor) -> Tensor:
        """A draw that tells its numbers apart and nothing else."""
        return (settings[-1] * VOCAB).long()

    own: dict[str, Any] = {"uniforms": uniforms, "penalties": sampling_kernels.penalties}
    assert sample(logits, rows, **own).token_ids == sample(logits, rows).token_ids
    assert not asked, "only a platform's own draw takes its numbers"
    assert sample(logits, rows, fused, **own).token_ids == sample(logits, rows, fused).token_ids
    assert asked and asked[0] >= 16


def test_penalties_that_raise_fail_only_their_rows() -> None:
    def broken(logits: Tensor, *given: Tensor) -> None:
        raise ValueError("no kernel")

    rows = [
        row_of(SamplingSpec(seed=1, repetition_penalty=1.1), [1], 1, VOCAB),
        row_of(SamplingSpec(seed=2), [1], 1, VOCAB),
    ]
    out = sample(logits_of(2), rows, penalties=broken)
    assert out.errors == {0: "sampling failed: ValueError: no kernel"}
    assert out.token_ids[1] == sample(logits_of(2)[1:], rows[1:]).token_ids[0]
