"""Repetition detection against its definition, written naively: the tail is `count` equal pieces of one allowed length."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.engine.repetition import RepetitionDetector
from infer.engine.request import Status
from infer.options import RepetitionDetection
from step_driver import new_request

pytestmark = pytest.mark.row("SAMPLE-REPETITION", "stops on exactly the predicted token")

rules = st.tuples(st.integers(1, 6), st.integers(0, 5), st.integers(2, 5)).map(
    lambda drawn: RepetitionDetection(
        min_pattern_size=drawn[0], max_pattern_size=drawn[0] + drawn[1], min_count=drawn[2]
    )
)
few_ids = st.lists(st.integers(0, 2), max_size=60)
"""Of so few different tokens that loops come about by themselves."""


def loops(tokens: Sequence[int], rule: RepetitionDetection) -> bool:
    for size in range(rule.min_pattern_size, rule.max_pattern_size + 1):
        tail = list(tokens[-size * rule.min_count :])
        if len(tail) == size * rule.min_count and tail == tail[:size] * rule.min_count:
            return True
    return False


@given(tokens=few_ids, rule=rules)
def test_every_token_is_judged_as_the_definition_says(tokens: list[int], rule: RepetitionDetection) -> None:
    detector = RepetitionDetector(rule)
    assert [detector.feed(token) for token in tokens] == [loops(tokens[: i + 1], rule) for i in range(len(tokens))]


@given(
    start=st.lists(st.integers(100, 200), max_size=20, unique=True),
    pattern=st.lists(st.integers(0, 99), min_size=1, max_size=8, unique=True),
    count=st.integers(2, 6),
)
def test_a_planned_loop_is_found_with_the_last_token_of_its_last_piece(
    start: list[int], pattern: list[int], count: int
) -> None:
    detector = RepetitionDetector(RepetitionDetection(max_pattern_size=len(pattern), min_count=count))
    verdicts = [detector.feed(token) for token in start + pattern * count]
    assert verdicts == [False] * (len(verdicts) - 1) + [True]


@given(
    prompt=few_ids.filter(len),
    tokens=few_ids,
    rule=rules,
    min_tokens=st.integers(0, 30),
    forced=st.integers(0, 20),
    steps=st.lists(st.integers(1, 4), min_size=60, max_size=60),
)
def test_a_request_ends_with_the_first_token_that_may_end_it(
    prompt: list[int], tokens: list[int], rule: RepetitionDetection, min_tokens: int, forced: int, steps: list[int]
) -> None:
    """Whatever the prompt holds, and however many tokens a step brings. Id 2 is a stop id, which goes first."""
    request = new_request(
        prompt, 50, stop_ids={2: 2}, min_tokens=min_tokens, forced_token_ids=tuple(tokens[:forced]), rule=rule
    )
    expected: tuple[int, str | None] = (min(len(tokens), 50), "length" if len(tokens) >= 50 else None)
    for index in range(len(tokens[:50])):
        if index + 1 < len(request.sampling.forced_token_ids):
            continue
        if tokens[index] == 2:
            expected = (index + 1, "stop")
            break
        if index + 1 >= min_tokens and loops(tokens[: index + 1], rule):
            expected = (index + 1, "repetition")
            break
    left = list(tokens)
    while left and request.status is not Status.FINISHED:
        size = steps.pop()
        request.accept(left[:size])
        del left[:size]
    assert (request.num_output, request.finish_reason) == expected
