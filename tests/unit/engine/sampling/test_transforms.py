"""Each transform by itself: the cases of the behaviour list, ties, and settings that change nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from infer.engine.sampling.row import Feature, features_of, make_row
from infer.engine.sampling.token_counts import TokenCounts
from infer.engine.step import ProcessorUse, SamplingSpec
from infer.errors import InvalidRequestError
from unit.engine.sampling.settings import CPU, processed, row_of

INF = math.inf


def run(logits: Sequence[float], ids: Sequence[int] = (0,), prompt_len: int = 1, **settings: Any) -> list[float]:
    values: list[float] = processed(SamplingSpec(seed=0, **settings), ids, prompt_len, torch.tensor(logits)).tolist()
    return values


def kept(values: Sequence[float]) -> list[int]:
    return [i for i, value in enumerate(values) if value > -INF]


def test_case_49_penalties_look_at_the_output_and_repetition_at_everything() -> None:
    equal, ids = [1.0] * 5, [0, 1, 2, 2, 3]  # prompt 0, 1; output 2, 2, 3
    assert run(equal, ids, 2, presence_penalty=2.0) == [1, 1, -1, -1, 1]
    assert run(equal, ids, 2, presence_penalty=-2.0) == [1, 1, 3, 3, 1]
    assert run(equal, ids, 2, frequency_penalty=2.0) == [1, 1, -3, -1, 1]
    assert run(equal, ids, 2, frequency_penalty=-2.0) == [1, 1, 5, 3, 1]
    assert run(equal, ids, 2, repetition_penalty=2.0) == [0.5, 0.5, 0.5, 0.5, 1]
    assert run([-1.0] * 5, ids, 2, repetition_penalty=2.0) == [-2, -2, -2, -2, -1]
    assert run(equal, ids, 2, repetition_penalty=0.5) == [2, 2, 2, 2, 1]


def test_case_50_a_bad_word_is_masked_only_behind_its_beginning() -> None:
    equal = [0.0] * 6
    assert kept(run(equal, [7, 1, 2], bad_words=((1, 2, 3),))) == [0, 1, 2, 4, 5]
    assert kept(run(equal, [7, 2, 1], bad_words=((1, 2, 3),))) == [0, 1, 2, 3, 4, 5]
    assert kept(run(equal, [2], bad_words=((1, 2, 3),))) == [0, 1, 2, 3, 4, 5]
    assert kept(run(equal, [7], bad_words=((4,), (5,)))) == [0, 1, 2, 3]
    assert kept(run(equal, [1, 2], prompt_len=2, bad_words=((1, 2, 3), (2, 4)))) == [0, 1, 2, 5]


@pytest.mark.parametrize(("k", "count"), [(50, 5), (5, 5), (3, 3), (1, 1)])
def test_case_51_top_k_keeps_at_most_k_finite_logits(k: int, count: int) -> None:
    logits = [-INF, 2.0, -INF, 1.0, 0.0, 3.0, -INF, -1.0] + [-INF] * 60
    out = run(logits, top_k=k)
    assert len(kept(out)) == count and not any(math.isnan(value) for value in out)
    assert 5 in kept(out)


@pytest.mark.parametrize("settings", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2}, {"top_k": 3, "top_p": 0.9}])
def test_case_51_all_masked_stays_all_masked(settings: dict[str, Any]) -> None:
    out = run([-INF] * 8, **settings)
    assert kept([value for value in out if not math.isnan(value)]) == []
    assert out == [-INF] * 8


@pytest.mark.parametrize("width", [8, 512])
def test_equal_logits_at_the_border_keep_the_lowest_ids(width: int) -> None:
    logits = [1.0] * width
    assert kept(run(logits, top_k=1)) == [0]
    assert kept(run(logits, top_k=4)) == [0, 1, 2, 3]
    assert kept(run([0.0, *logits], top_k=2)) == [1, 2]
    assert kept(run(logits, top_p=0.5)) == list(range(width // 2))
    assert kept(run([9.0, *logits], top_p=1e-9)) == [0]


def test_a_long_flat_nucleus_is_counted_to_its_end() -> None:
    assert len(kept(run([0.0] * 8192, top_p=0.75))) == 6144


def test_min_tokens_masks_stop_ids_until_enough_outputs() -> None:
    for outputs in range(5):
        out = run([0.0] * 4, [0] * (1 + outputs), 1, min_tokens=3, min_tokens_masked_ids=(1, 3))
        assert kept(out) == ([0, 2] if outputs < 3 else [0, 1, 2, 3])


def test_bias_cannot_bring_back_what_is_not_allowed() -> None:
    assert run([0.0] * 3, allowed_token_ids=(1,), logit_bias=((0, 100.0), (1, -5.0))) == [-INF, -5.0, -INF]


def test_every_setting_has_its_feature_and_greedy_has_none() -> None:
    assert features_of(SamplingSpec(seed=0, temperature=0.0)) == 0
    truncations = SamplingSpec(seed=0, temperature=0.0, top_k=4, top_p=0.3, min_p=0.2)
    assert features_of(truncations) == 0
    assert features_of(SamplingSpec(seed=0)) == Feature.RANDOM
    everything = SamplingSpec(
        seed=0, temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, repetition_penalty=1.1, frequency_penalty=0.1,
        min_tokens=1, min_tokens_masked_ids=(1,), logit_bias=((1, 1.0),), allowed_token_ids=(1,), bad_words=((1,),),
        logprobs=0, prompt_logprobs=0, forced_token_ids=(1,), return_kept_set=True,
        thinking_budget=3, logits_processors=(ProcessorUse(name="f"),),
    )  # fmt: skip
    assert features_of(everything) == sum(Feature)


def test_token_counts_grow_like_a_counter() -> None:
    counts = TokenCounts([5, 6, 5, 7, 7], 3)
    for token_id in [7, 5, *range(100, 400)]:
        counts.add(token_id)
    held = dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))
    assert held == {5: 1, 6: 0, 7: 3} | dict.fromkeys(range(100, 400), 1)


@pytest.mark.parametrize(
    ("settings", "parameter"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": INF}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"frequency_penalty": math.nan}, "frequency_penalty"),
        ({"presence_penalty": INF}, "presence_penalty"),
        ({"logit_bias": ((1, math.nan),)}, "logit_bias"),
        ({"logit_bias": ((-1, 1.0),)}, "logit_bias"),
        ({"allowed_token_ids": (9,)}, "allowed_token_ids"),
        ({"bad_words": ((1, 9),)}, "bad_words"),
        ({"min_tokens": 1, "min_tokens_masked_ids": (9,)}, "stop_token_ids"),
    ],
)
def test_settings_that_would_spoil_a_step_are_named(settings: dict[str, Any], parameter: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        make_row(SamplingSpec(**{"seed": 0} | settings), [0], 1, 9, CPU)
    assert raised.value.parameter == parameter


def test_accept_keeps_the_tail_no_longer_than_the_longest_bad_word_needs() -> None:
    row = row_of(SamplingSpec(seed=0, bad_words=((1, 2, 3), (4,))), [0, 1, 2, 3], 2, 9)
    assert row.tail == [2, 3]
    row.accept(7)
    assert row.tail == [3, 7]
    plain: Tensor | None = row_of(SamplingSpec(seed=0), [0, 1], 1, 9).allowed
    assert plain is None
