"""Logits processors in the sampler: their place in the order, their history, their neighbours when one raises."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from infer.engine.sampling.processor_row import Processors
from infer.engine.sampling.row import Feature, SamplingRow, make_row
from infer.engine.sampling.sampler import ORDER, process, sample
from infer.engine.step import ProcessorUse, SamplingSpec
from processor_samples import Fails, Forces, Watches

CPU = torch.device("cpu")
ROW = "SAMPLE-CUSTOM-PROCESSORS"
MADE = {"forces": Forces, "watches": Watches, "fails": Fails}
VOCAB = 12


def functions(*given: Any) -> tuple[ProcessorUse, ...]:
    return tuple(ProcessorUse(name=f"f{i}", function=function) for i, function in enumerate(given))


def plugin(name: str, **params: Any) -> ProcessorUse:
    return ProcessorUse(name=name, params=params)


def rows_of(*specs: SamplingSpec, ids: Sequence[int] = (1, 2), prompt_len: int = 1) -> list[SamplingRow]:
    processors = Processors(lambda name: MADE[name](VOCAB))
    return [
        make_row(spec, ids, prompt_len, VOCAB, CPU, None, processors.of_row(spec, ids, prompt_len)) for spec in specs
    ]


def logits(count: int = 1, seed: int = 0) -> Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed))


@pytest.mark.row(ROW, "they run after filters and bias and before penalties")
def test_the_place_in_the_order() -> None:
    flags = [flag for flag, _ in ORDER]
    place = flags.index(Feature.PROCESSORS)
    before = {Feature.ALLOWED, Feature.BAD_WORDS, Feature.BIAS, Feature.MIN_TOKENS}
    assert before <= set(flags[:place])
    assert flags[place + 1 :][:2] == [Feature.REPETITION, Feature.OUTPUT_PENALTIES]


@pytest.mark.row(ROW, "they run after filters and bias and before penalties")
def test_what_a_processor_sees_and_what_becomes_of_its_work() -> None:
    seen: list[Tensor] = []

    def double(prompt: Sequence[int], output: Sequence[int], values: Tensor) -> Tensor:
        seen.append(values.clone())
        return values * 2

    spec = SamplingSpec(
        seed=0,
        logit_bias=((3, 5.0),),
        allowed_token_ids=(2, 3, 4),
        bad_words=((4,),),
        presence_penalty=1.5,
        temperature=0.5,
        logits_processors=functions(double),
    )
    raw = logits()
    (row,) = rows_of(spec)  # 2 was said
    values = raw.clone()
    process(values, [row])
    expected = torch.full((VOCAB,), float("-inf"))
    expected[2], expected[3] = raw[0, 2], raw[0, 3] + 5.0
    assert torch.equal(seen[0], expected)
    expected = expected * 2
    expected[2] -= 1.5
    assert torch.allclose(values[0], expected / 0.5)


@pytest.mark.row(ROW, "a processor that forces token t yields only t")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("use", ["function", "plugin"])
def test_forcing(use: str, temperature: float) -> None:
    def only(prompt: Sequence[int], output: Sequence[int], values: Tensor) -> None:
        kept = values[7].item()
        values[:] = float("-inf")
        values[7] = kept

    uses = functions(only) if use == "function" else (plugin("forces", token=7),)
    spec = SamplingSpec(
        seed=1, temperature=temperature, repetition_penalty=1.7, frequency_penalty=2.0, logits_processors=uses
    )
    for seed in range(20):
        assert sample(logits(3, seed), rows_of(spec, spec, spec)).token_ids == [7, 7, 7]


@pytest.mark.row(ROW, "one that raises fails only its request")
@pytest.mark.parametrize("use", ["function", "plugin"])
def test_one_that_raises(use: str) -> None:
    calls: list[int] = []

    def fails(prompt: Sequence[int], output: Sequence[int], values: Tensor) -> None:
        calls.append(1)
        values[:] = 0.0
        raise RuntimeError("planted")

    bad = functions(fails) if use == "function" else (plugin("fails", at=1),)
    good = functions(lambda prompt, output, values: None) if use == "function" else (plugin("fails", at=99),)
    specs = [
        SamplingSpec(seed=i, logprobs=2, logprobs_mode="processed", logits_processors=uses)
        for i, uses in enumerate([good, bad, (), good])
    ]
    plain = [SamplingSpec(seed=i, logprobs=2, logprobs_mode="processed") for i in range(4)]
    values = logits(4)
    result, expected = sample(values, rows_of(*specs)), sample(values, rows_of(*plain))
    assert list(result.errors) == [1] and "planted" in result.errors[1] and "RuntimeError" in result.errors[1]
    for i in (0, 2, 3):
        assert (result.token_ids[i], result.logprobs[i]) == (expected.token_ids[i], expected.logprobs[i])
    assert 1 not in result.logprobs
    assert len(calls) == (1 if use == "function" else 0), "nobody is asked twice because a neighbour failed"


def test_the_order_is_the_requests_and_a_batch_is_one_call() -> None:
    seen: list[Any] = []
    first = functions(lambda prompt, output, values: values + 1, lambda prompt, output, values: values * 3)
    second = functions(lambda prompt, output, values: values * 3, lambda prompt, output, values: values + 1)
    values = torch.zeros(4, VOCAB)
    watched = SamplingSpec(seed=0, logits_processors=(plugin("watches", list=seen),))
    process(
        values,
        rows_of(
            SamplingSpec(seed=0, temperature=0.0, logits_processors=first),
            watched,
            SamplingSpec(seed=0, temperature=0.0, logits_processors=second),
            watched,
        ),
    )
    assert values[:, 0].tolist() == [3.0, 0.0, 1.0, 0.0]
    assert seen == [((1,), (2,), 2)] * 2


@pytest.mark.row(ROW, "they see exact token history")
@given(start=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6), said=st.integers(0, 6), data=st.data())
def test_history_follows_what_is_accepted(start: list[int], said: int, data: st.DataObject) -> None:
    """From any split of prompt and outputs, as when a preempted answer resumes; a function cannot spoil it."""
    prompt_len = max(1, len(start) - said)
    seen: list[Any] = []

    def watch(prompt: Sequence[int], output: Sequence[int], values: Tensor) -> None:
        seen.append((tuple(prompt), tuple(output)))
        if isinstance(output, list):
            output.append(99)

    spec = SamplingSpec(seed=0, logits_processors=(*functions(watch), plugin("watches", list=(batch := []))))
    (row,) = rows_of(spec, ids=start, prompt_len=prompt_len)
    output = start[prompt_len:]
    for _ in range(4):
        process(logits(), [row])
        assert seen[-1] == batch[-1][:2] == (tuple(start[:prompt_len]), tuple(output))
        output.append(data.draw(st.integers(0, VOCAB - 1)))
        row.accept(output[-1])


@pytest.mark.parametrize(
    ("returned", "words"),
    [(torch.zeros(VOCAB + 1), r"a tensor \[13\]"), ([0.0] * VOCAB, "list"), (True, "bool")],
)
def test_what_is_not_logits_is_an_error(returned: Any, words: str) -> None:
    spec = SamplingSpec(seed=0, logits_processors=functions(lambda prompt, output, values: returned))
    assert re.search(words, sample(logits(), rows_of(spec)).errors[0])


@pytest.mark.parametrize(
    ("value", "words"), [(float("nan"), "nan"), (float("inf"), "inf"), (float("-inf"), "no token")]
)
def test_values_that_cannot_be_sampled_are_an_error_of_that_row(value: float, words: str) -> None:
    spoil = SamplingSpec(seed=0, logits_processors=functions(lambda prompt, output, values: values * 0 + value))
    result = sample(logits(2), rows_of(spoil, SamplingSpec(seed=0)))
    assert list(result.errors) == [0] and words in result.errors[0]
