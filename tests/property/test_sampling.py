"""Sampling invariants: a row's result is a function of its own logits, seed and position, and draws invert the CDF."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infer.engine.sampling.draw import BLOCK, invert
from infer.engine.sampling.ranking import best_ids, best_values
from infer.engine.sampling.sampler import Sampled, sample
from infer.engine.step import SamplingSpec
from unit.engine.sampling.settings import processed, random_case, row_of

POOL = 10


def pool(vocab: int) -> tuple[torch.Tensor, list[tuple[SamplingSpec, list[int], int]]]:
    """Rows to make batches of, every one with logprobs."""
    rng = random.Random(vocab)
    cases = []
    for _ in range(POOL):
        spec, ids, prompt_len = random_case(rng, vocab)
        fields = {name: getattr(spec, name) for name in SamplingSpec.__struct_fields__}
        cases.append((SamplingSpec(**fields | {"logprobs": 3, "allowed_token_ids": None}), ids, prompt_len))
    return torch.randn(POOL, vocab, generator=torch.Generator().manual_seed(1)) * 2, cases


POOLS = {vocab: pool(vocab) for vocab in (67, 50_257)}


def run(vocab: int, members: list[int]) -> Sampled:
    logits, cases = POOLS[vocab]
    return sample(logits[members], [row_of(*cases[i], vocab) for i in members])


ALONE = {vocab: [run(vocab, [i]) for i in range(POOL)] for vocab in POOLS}


@pytest.mark.row("SAMPLE-CORE", "a seed repeats across batch composition, any rows in any order")
@given(st.data(), st.lists(st.integers(0, POOL - 1), min_size=1, max_size=14))
def test_a_row_gives_the_same_bits_in_every_batch(data: st.DataObject, members: list[int]) -> None:
    vocab = data.draw(st.sampled_from([67, 67, 67, 50_257]))
    out = run(vocab, members)
    assert out.errors == {}
    for place, i in enumerate(members):
        alone = ALONE[vocab][i]
        assert (out.token_ids[place], out.logprobs[place]) == (alone.token_ids[0], alone.logprobs[0])


@pytest.mark.parametrize("threads", [2, 3])
def test_the_number_of_threads_does_not_move_a_draw(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out = run(50_257, list(range(POOL)))
    finally:
        torch.set_num_threads(before)
    assert out.token_ids == [alone.token_ids[0] for alone in ALONE[50_257]]
    assert list(out.logprobs.values()) == [alone.logprobs[0] for alone in ALONE[50_257]]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=700).filter(any), st.integers(0, 2**53 - 1))
def test_a_draw_is_the_exact_inverse_of_the_cumulative_weights(weights: list[int], bits: int) -> None:
    """Small integers add up without rounding, so fractions are an exact oracle."""
    number = bits / 2**53
    target = Fraction(number) * sum(weights)
    expected = next(i for i, total in enumerate(itertools.accumulate(weights)) if total > target)
    drawn = int(invert(torch.tensor([weights], dtype=torch.float32), torch.tensor([number], dtype=torch.float64))[0])
    # The product of number and total is rounded once: it may land on a border the exact one just misses.
    if math.isclose(number * sum(weights), round(number * sum(weights)), rel_tol=1e-15):
        assert weights[drawn] > 0 and abs(sum(weights[: drawn + 1]) - float(target)) <= max(weights) + 1e-9
    else:
        assert drawn == expected


@given(st.integers(1, 300), st.integers(0, 2**32), st.sampled_from([0.0, 1.0 - 2**-53]))
def test_the_ends_of_the_unit_interval_draw_tokens_of_positive_weight(width: int, seed: int, number: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(1, width, generator=generator) * (torch.rand(1, width, generator=generator) < 0.3)
    weights[0, seed % width] = 0.25
    drawn = int(invert(weights, torch.tensor([number], dtype=torch.float64))[0])
    positive = weights[0].nonzero().flatten().tolist()
    assert drawn == (positive[0] if number == 0 else positive[-1])


def test_a_target_on_the_border_of_a_block_draws_no_token_of_weight_zero() -> None:
    """Sums within a block and over blocks round differently; the search must not fall between them."""
    weights = torch.zeros(5000, 2 * BLOCK + 1, dtype=torch.float32)
    # exponents far enough apart that sums round in double
    weights[:, :BLOCK] = torch.exp(-25 * torch.rand(5000, BLOCK, generator=torch.Generator().manual_seed(0)))
    weights[:, -1] = 1e-7
    sums = weights.view(5000, -1)[:, :BLOCK].sum(dim=-1, dtype=torch.float64)
    totals = weights.sum(dim=-1, dtype=torch.float64)
    for nudge in range(-3, 4):
        numbers = sums / totals
        for _ in range(abs(nudge)):
            numbers = torch.nextafter(numbers, torch.full_like(numbers, float(nudge > 0)))
        drawn = invert(weights, numbers)
        assert bool((weights.gather(1, drawn[:, None]) > 0).all())
        assert set(drawn.tolist()) <= {BLOCK - 1, 2 * BLOCK}


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=400), st.data())
def test_best_ids_equal_a_stable_sort(values: list[int], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(values)))
    tensor = torch.tensor([values, values[::-1]], dtype=torch.float32)
    for row, ids, best in zip(
        tensor.tolist(), best_ids(tensor, k).tolist(), best_values(tensor, k).tolist(), strict=True
    ):
        expected = sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]
        assert ids == expected
        assert best == [row[i] for i in expected]


@given(st.lists(st.integers(-4, 4), min_size=1, max_size=300), st.floats(0.01, 0.999), st.integers(1, 320))
def test_truncation_keeps_the_smallest_sufficient_set(values: list[int], top_p: float, top_k: int) -> None:
    logits = torch.tensor(values, dtype=torch.float32)
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    by_k = processed(SamplingSpec(seed=0, top_k=top_k), [0], 1, logits)
    assert {i for i, v in enumerate(by_k.tolist()) if v > -math.inf} == set(order[:top_k])
    by_p = processed(SamplingSpec(seed=0, top_p=top_p), [0], 1, logits)
    kept = [i for i in order if by_p[i] > -math.inf]
    assert kept == order[: len(kept)] and kept
    probabilities = torch.softmax(logits.double(), dim=-1)
    mass = float(probabilities[kept].sum())
    assert mass >= top_p - 1e-6 or len(kept) == len(values)
    assert len(kept) == 1 or mass - float(probabilities[kept[-1]]) < top_p + 1e-6
