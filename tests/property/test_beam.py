"""Beam search without an engine: a tree computed by hand, and an independent implementation on random trees full of ties."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.engine.beam import BeamState
from infer.types import TokenLogprob

ROW = "SAMPLE-BEAM"
A, B, E = range(3)
LogProbs = Callable[[tuple[int, ...]], Sequence[float]]
"""Output so far -> log-probability of every id."""
Found = list[tuple[tuple[int, ...], float, str]]
"""(output, score, why it ended), best first."""


def searched(
    log_probs: LogProbs,
    *,
    prompt_len: int,
    width: int,
    penalty: float,
    max_tokens: int,
    stop_ids: Sequence[int],
    stops_early: bool = True,
) -> tuple[Found, int]:
    """By `BeamState`, which is given no more candidates than it asks for; and how many steps it took."""
    state = BeamState(
        prompt_len=prompt_len,
        width=width,
        length_penalty=penalty,
        max_tokens=max_tokens,
        stop_ids=dict.fromkeys(stop_ids),
    )
    steps = 0
    while state.live and not (stops_early and state.is_over):
        steps += 1
        candidates = []
        for beam in state.live:
            values = log_probs(beam.token_ids)
            ranked = sorted(range(len(values)), key=lambda token_id: -values[token_id])
            candidates.append([TokenLogprob(t, values[t], 1) for t in ranked[: state.num_candidates]])
        state.advance(candidates)
    if state.live:
        state.end("length")
    return [(beam.token_ids, state.score(beam), str(beam.finish_reason)) for beam in state.best(width)], steps


def independent(
    log_probs: LogProbs, *, prompt_len: int, width: int, penalty: float, max_tokens: int, stop_ids: Sequence[int]
) -> Found:
    """Every continuation of every beam, nothing thrown away before the end, no early stop."""

    def score(tokens: tuple[int, ...], total: float) -> float:
        seq_len = prompt_len + len(tokens)
        if tokens[-1] in stop_ids:
            seq_len -= 1
        return float(total / seq_len**penalty)

    running: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    finished: Found = []
    for _ in range(max_tokens):
        grown: list[tuple[tuple[int, ...], float]] = []
        for tokens, total in running:
            values = log_probs(tokens)
            for token_id in sorted(range(len(values)), key=lambda one: -values[one]):
                grown.append(((*tokens, token_id), total + values[token_id]))
        grown = sorted(grown, key=lambda one: one[1], reverse=True)
        finished += [(t, score(t, total), "stop") for t, total in grown[:width] if t[-1] in stop_ids]
        running = [one for one in grown if one[0][-1] not in stop_ids][:width]
    finished += [(t, score(t, total), "length") for t, total in running]
    return sorted(finished, key=lambda one: one[1], reverse=True)[:width]


def tree(tokens: tuple[int, ...]) -> Sequence[float]:
    """Log-probabilities of A, B and the end."""
    if not tokens:
        return (-1.0, -2.0, -3.0)
    if tokens == (A,):
        return (-4.0, -2.0, -1.0)
    if tokens == (B,):
        return (-1.0, -3.0, -0.5)
    return (-1.0, -2.0, -0.25)


BY_HAND: list[tuple[int, float, Found]] = [
    (1, 0.0, [((A, E), -2.0, "stop")]),
    (2, 0.0, [((A, E), -2.0, "stop"), ((B, E), -2.5, "stop")]),
    (3, 0.0, [((A, E), -2.0, "stop"), ((B, E), -2.5, "stop"), ((E,), -3.0, "stop")]),
    (4, 0.0, [((A, E), -2.0, "stop"), ((B, E), -2.5, "stop"), ((E,), -3.0, "stop"), ((A, B, E), -3.25, "stop")]),
    (1, 1.0, [((A, E), -2 / 3, "stop")]),
    (2, 1.0, [((A, E), -2 / 3, "stop"), ((A, B, A), -4 / 5, "length")]),
    (3, 1.0, [((A, E), -2 / 3, "stop"), ((A, B, A), -4 / 5, "length"), ((B, A, A), -4 / 5, "length")]),
    (
        4,
        1.0,
        [
            ((A, E), -2 / 3, "stop"),
            ((A, B, A), -4 / 5, "length"),
            ((B, A, A), -4 / 5, "length"),
            ((A, B, E), -3.25 / 4, "stop"),
        ],
    ),
]
"""The prompt has two tokens, three may be written. (A, E) is 2 + 2 tokens long, less the one that ends it."""


@pytest.mark.row(ROW, "equals a hand-computed tree, for widths 1 to 4")
@pytest.mark.parametrize(("width", "penalty", "expected"), BY_HAND)
def test_the_tree_by_hand(width: int, penalty: float, expected: Found) -> None:
    options = {"prompt_len": 2, "width": width, "penalty": penalty, "max_tokens": 3, "stop_ids": [E]}
    assert searched(tree, **options)[0] == expected  # type: ignore[arg-type]
    assert independent(tree, **options) == expected  # type: ignore[arg-type]


@pytest.mark.row(
    ROW,
    "equals an independent implementation of the score, prompt counted, end not counted, stable ties, widths 1 to 4",
)
@given(
    steps=st.lists(st.lists(st.integers(-6, 0), min_size=5, max_size=5), min_size=1, max_size=6),
    prompt_len=st.integers(1, 9),
    width=st.integers(1, 4),
    penalty=st.sampled_from([0.0, 1.0, 0.6, 2.0, -1.0]),
    max_tokens=st.integers(1, 5),
    num_stops=st.integers(0, 2),
)
def test_random_trees(
    steps: list[list[int]], prompt_len: int, width: int, penalty: float, max_tokens: int, num_stops: int
) -> None:
    """Values are whole numbers, so that ties abound and sums are exact. Early stopping changes nothing."""

    def log_probs(tokens: tuple[int, ...]) -> Sequence[float]:
        return [float(value) for value in steps[(sum(tokens) + 3 * len(tokens)) % len(steps)]]

    options = {"prompt_len": prompt_len, "width": width, "penalty": penalty, "max_tokens": max_tokens}
    stop_ids = list(range(5))[5 - num_stops :]
    found, taken = searched(log_probs, **options, stop_ids=stop_ids)  # type: ignore[arg-type]
    whole, longest = searched(log_probs, **options, stop_ids=stop_ids, stops_early=False)  # type: ignore[arg-type]
    assert found == whole == independent(log_probs, **options, stop_ids=stop_ids)  # type: ignore[arg-type]
    assert taken <= longest <= max_tokens


def test_it_stops_as_soon_as_nothing_can_change() -> None:
    options = {"prompt_len": 2, "width": 1, "max_tokens": 1000, "stop_ids": [E]}
    assert searched(tree, penalty=0.0, **options)[1] == 2  # type: ignore[arg-type]
    assert searched(tree, penalty=1.0, **options)[1] > 2, "a long answer could still be better"  # type: ignore[arg-type]
