"""Sampling settings that no logits can satisfy are refused at admission, and nothing that some logits can satisfy is."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer import InvalidRequestError, SamplingParams
from infer.engine.feasibility import check_feasible
from infer.engine.step import SamplingSpec
from infer.testing.fake_engine import EOS
from served import letters_engine

VOCAB = 4


def check(spec: SamplingSpec, prompt: Sequence[int] = (0,), stop_ids: Sequence[int] = (), max_tokens: int = 6) -> None:
    check_feasible(spec, prompt, dict.fromkeys(stop_ids), max_tokens, VOCAB)


@pytest.mark.parametrize(
    ("spec", "prompt", "parameters"),
    [
        (SamplingSpec(seed=0, allowed_token_ids=(1,), bad_words=((1,),)), [0], ["allowed_token_ids", "bad_words"]),
        (
            SamplingSpec(seed=0, allowed_token_ids=(3,), min_tokens=2, min_tokens_masked_ids=(3,)),
            [0],
            ["allowed_token_ids", "min_tokens"],
        ),
        (SamplingSpec(seed=0, bad_words=((0,), (1,), (2,), (3,))), [0], ["bad_words"]),
        (
            SamplingSpec(seed=0, bad_words=((0,), (1,)), min_tokens=1, min_tokens_masked_ids=(2, 3)),
            [0],
            ["bad_words", "min_tokens"],
        ),
        (SamplingSpec(seed=0, min_tokens=1, min_tokens_masked_ids=(0, 1, 2, 3)), [0], ["min_tokens"]),
        # The prompt has the beginning of the bad word.
        (SamplingSpec(seed=0, allowed_token_ids=(1,), bad_words=((2, 1),)), [2], ["allowed_token_ids", "bad_words"]),
        # The answer writes it itself, at once or after a while, by whatever way.
        (SamplingSpec(seed=0, allowed_token_ids=(1,), bad_words=((1, 1, 1),)), [0], ["allowed_token_ids", "bad_words"]),
        (
            SamplingSpec(seed=0, allowed_token_ids=(1, 2), bad_words=((1, 1), (1, 2), (2, 1), (2, 2))),
            [0],
            ["allowed_token_ids", "bad_words"],
        ),
        (
            SamplingSpec(seed=0, allowed_token_ids=(1,), bad_words=((3, 1),), forced_token_ids=(2, 3)),
            [0],
            ["allowed_token_ids", "bad_words"],
        ),
    ],
)
def test_what_nothing_can_satisfy_names_the_parameters(
    spec: SamplingSpec, prompt: list[int], parameters: list[str]
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check(spec, prompt)
    assert caught.value.parameter == parameters[0]
    assert all(name in str(caught.value) for name in parameters)


@pytest.mark.parametrize(
    "spec",
    [
        SamplingSpec(seed=0),
        SamplingSpec(seed=0, allowed_token_ids=(3,)),
        SamplingSpec(seed=0, allowed_token_ids=(1,), bad_words=((2, 1),)),
        SamplingSpec(seed=0, allowed_token_ids=(1, 2), bad_words=((1, 1), (2, 2))),  # they take turns
        SamplingSpec(seed=0, allowed_token_ids=(1, 3), min_tokens=6, min_tokens_masked_ids=(3,)),
        SamplingSpec(seed=0, allowed_token_ids=(1,), bad_words=((1,) * 7,)),  # too long to be written
        SamplingSpec(seed=0, logit_bias=((0, -100.0), (1, -100.0), (2, -100.0), (3, -100.0))),
    ],
)
def test_what_can_be_satisfied_passes(spec: SamplingSpec) -> None:
    check(spec)


def test_an_end_token_in_time_is_a_way_out() -> None:
    spec = SamplingSpec(seed=0, allowed_token_ids=(1, 3), bad_words=((1, 1),))
    with pytest.raises(InvalidRequestError):
        check(SamplingSpec(seed=0, allowed_token_ids=(1,), bad_words=((1, 1),)), stop_ids=[3])
    check(spec, stop_ids=[3])
    with pytest.raises(InvalidRequestError):  # not if it has to wait
        check(
            SamplingSpec(
                seed=0, allowed_token_ids=(1, 3), bad_words=((1, 1),), min_tokens=2, min_tokens_masked_ids=(3,)
            ),
            stop_ids=[3],
        )


@pytest.mark.parametrize(("penalty", "temperature"), [(1e-45, 0.0), (1e-29, 0.01), (1e-300, 1.0)])
def test_a_penalty_that_makes_every_logit_infinite(penalty: float, temperature: float) -> None:
    with pytest.raises(InvalidRequestError, match=r"repetition_penalty=.* and temperature=") as caught:
        check(SamplingSpec(seed=0, repetition_penalty=penalty, temperature=temperature))
    assert caught.value.parameter == "repetition_penalty"
    check(SamplingSpec(seed=0, repetition_penalty=0.01, temperature=1e-5))


ids = st.integers(0, VOCAB - 1)


@given(
    allowed=st.none() | st.lists(ids, min_size=1, max_size=3).map(tuple),
    bad_words=st.lists(st.lists(ids, min_size=1, max_size=3).map(tuple), max_size=8).map(tuple),
    min_tokens=st.integers(0, 4),
    stop_ids=st.sets(ids, max_size=2),
    prompt=st.lists(ids, min_size=1, max_size=3),
    forced=st.lists(ids, max_size=2).map(tuple),
)
def test_it_refuses_exactly_what_trying_every_answer_shows_to_be_impossible(
    allowed: tuple[int, ...] | None,
    bad_words: tuple[tuple[int, ...], ...],
    min_tokens: int,
    stop_ids: set[int],
    prompt: list[int],
    forced: tuple[int, ...],
) -> None:
    length = 5
    spec = SamplingSpec(
        seed=0,
        allowed_token_ids=allowed,
        bad_words=bad_words,
        min_tokens=min_tokens,
        min_tokens_masked_ids=tuple(sorted(stop_ids)) if min_tokens else (),
        forced_token_ids=forced,
    )

    def fits(answer: tuple[int, ...]) -> bool:
        """As the sampler rules, token by token."""
        for position, token_id in enumerate(answer):
            before = [*prompt, *answer[:position]]
            if position < len(forced):
                if token_id != forced[position]:
                    return False
            elif (
                (allowed is not None and token_id not in allowed)
                or (position < min_tokens and token_id in stop_ids)
                or any(w[-1] == token_id and before[len(before) - len(w) + 1 :] == list(w[:-1]) for w in bad_words)
            ):
                return False
            if token_id in stop_ids:
                return True
        return True

    possible = any(fits(answer) for answer in itertools.product(range(VOCAB), repeat=length))
    try:
        check(spec, prompt, sorted(stop_ids), length)
        refused = False
    except InvalidRequestError:
        refused = True
    assert refused is not possible


@pytest.mark.anyio
async def test_the_engine_refuses_before_anything_runs() -> None:
    async with letters_engine() as engine:
        for params in (
            SamplingParams(allowed_token_ids=(EOS,), min_tokens=1),
            SamplingParams(allowed_token_ids=(97,), bad_words=("a",)),
            SamplingParams(allowed_token_ids=(97,), bad_words=("aaa",), ignore_eos=True),
        ):
            with pytest.raises(InvalidRequestError, match="no token can be sampled"):
                await engine.generate([104, 105], params)
        assert engine.statistics().steps == 0
        done = await engine.generate([104, 105], SamplingParams(allowed_token_ids=(97,), max_tokens=2))
    assert done.usage.output_tokens == 2
