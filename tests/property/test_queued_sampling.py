"""Sampling without waiting for the device gives what sampling with waiting gives: ids, log-probabilities, ranks, and failures."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fakes.cuda_table import best as best_of
from fakes.cuda_table import draw
from infer.engine.sampling.queued import can_queue, queue_sampling
from infer.engine.sampling.row import make_row
from infer.engine.sampling.sampler import Sampled, sample
from infer.engine.step import SamplingSpec

VOCAB = 37
CPU = torch.device("cpu")
SPECS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**63 - 1),
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 1.7]),
        "top_k": st.sampled_from([0, 1, 5, VOCAB]),
        "top_p": st.sampled_from([1.0, 0.9, 0.3]),
        "min_p": st.sampled_from([0.0, 0.1]),
        "logprobs": st.sampled_from([None, 0, 1, 4, VOCAB]),
        "logprobs_mode": st.sampled_from(["raw", "raw_logits"]),
        "logprob_token_ids": st.sampled_from([(), (3,), (36, 0, 5)]),
    }
)


def entries(sampled: Sampled) -> dict[int, tuple[Any, ...]]:
    return {
        i: (entry.token_id, entry.rank, [token_id for token_id, _ in entry.top])
        for i, entry in sampled.logprobs.items()
    }


def values(sampled: Sampled) -> list[float]:
    return [
        value
        for i in sorted(sampled.logprobs)
        for entry in [sampled.logprobs[i]]
        for value in (entry.logprob, *(value for _, value in entry.top), *entry.candidates)
    ]


@given(st.lists(SPECS, min_size=1, max_size=6), st.integers(0, 2**32), st.integers(0, 99), st.booleans(), st.data())
def test_both_ways_agree(
    specs: list[dict[str, Any]], seed: int, position: int, known_best: bool, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(specs), VOCAB, generator=generator) * 3
    logits[:, 7] = logits[:, 11]  # equal values count in the order of ids
    for i in range(len(specs)):
        poison = data.draw(st.sampled_from([None, None, None, "nan", "inf", "-inf", "ids"]), label=f"row {i}")
        if poison == "ids":
            logits[i, ::3] = -math.inf  # ids that cannot be drawn
        elif poison is not None:
            logits[i, slice(None) if poison == "-inf" else 5] = float(poison)
    rows = [make_row(SamplingSpec(**spec), [1, 2], 2, VOCAB, CPU) for spec in specs]
    for row in rows:
        row.output_position = position
    assert can_queue(rows, draw)
    best = best_of(logits) if known_best else None
    expected = sample(logits, rows, draw, best)
    queued = queue_sampling(logits, rows, lambda arrays: tuple(map(torch.from_numpy, arrays)), draw, best)
    found = queued.settle([tensor.clone() for tensor in queued.tensors])
    assert found.errors == expected.errors
    assert found.token_ids == expected.token_ids
    assert entries(found) == entries(expected)
    assert values(found) == pytest.approx(values(expected), abs=1e-5)


def test_plain_greedy_rows_need_nothing_else() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, 5.0, 0.0], [math.nan, 0.0, 0.0]])
    queued = queue_sampling(logits, None, lambda arrays: (), None, None)
    assert len(queued.tensors) == 2
    found = queued.settle(queued.tensors)
    assert found.token_ids[:2] == [1, 0] and found.errors == {2: "logits hold NaN"}


@pytest.mark.parametrize(
    "setting",
    [
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 1.5},
        {"logit_bias": ((3, 1.0),)},
        {"allowed_token_ids": (3, 4)},
        {"bad_words": ((3,),)},
        {"min_tokens": 3, "min_tokens_masked_ids": (2,)},
        {"forced_token_ids": (4,)},
        {"logprobs": 1, "logprobs_mode": "processed"},
        {"logprobs": 1, "return_kept_set": True},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_rows_that_need_the_host_are_not_queued(setting: dict[str, Any]) -> None:
    row = make_row(SamplingSpec(seed=1, **setting), [1, 2], 2, VOCAB, CPU)
    assert not can_queue([row], draw)
    assert can_queue([make_row(SamplingSpec(seed=1, prompt_logprobs=1), [1, 2], 2, VOCAB, CPU)], draw)
    assert not can_queue([make_row(SamplingSpec(seed=1), [1, 2], 2, VOCAB, CPU)], None), "nothing draws on the device"
