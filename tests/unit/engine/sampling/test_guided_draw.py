"""Rows with a guide through the platform's draw among allowed tokens: the tokens of the plain transforms, and who goes there."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from infer.backends.cpu.platform import create
from infer.engine.sampling.draw import MaskedDraw
from infer.engine.sampling.guide import Guide
from infer.engine.sampling.row import SamplingRow, make_row
from infer.engine.sampling.sampler import NO_TOKEN, sample
from infer.engine.step import SamplingSpec
from infer.engine.worker.guides import GuidedRows
from infer.errors import GrammarError
from infer.plugins.grammar import GrammarSource, Vocabulary

CPU = torch.device("cpu")
WIDTH = 300
VOCABULARY = Vocabulary(
    tokens=[b"%d," % i for i in range(WIDTH)], special_ids=frozenset({0}), eos_token_ids=(0,), encode=lambda text: []
)
SOURCE = GrammarSource(kind="regex", text="some")


class Allowing:
    """A matcher that always allows the same tokens; None: it cannot say."""

    def __init__(self, allowed: Sequence[int] | None) -> None:
        self._allowed = allowed

    def accept(self, token_id: int) -> str | None:
        return None

    def fill(self, mask: bytearray) -> None:
        if self._allowed is None:
            raise GrammarError("it is too deep")
        mask[:] = bytes(len(mask))
        for token_id in self._allowed:
            mask[token_id >> 3] |= 1 << (token_id & 7)

    can_end = is_complete = False


def guided(allowed: Sequence[int] | None, **settings: Any) -> SamplingRow:
    spec = SamplingSpec(**{"seed": 0, "grammar": SOURCE, **settings})
    guide = Guide(spec, VOCABULARY, Allowing(allowed))
    guide.prepare()
    return make_row(spec, [1, 2], 2, WIDTH, CPU, guide)


def unguided(**settings: Any) -> SamplingRow:
    return make_row(SamplingSpec(**{"seed": 0, **settings}), [1, 2], 2, WIDTH, CPU)


class Watched:
    """The native draw among allowed tokens, and the rows that it was asked for."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self, logits: Tensor, rows: Tensor, *rest: Tensor) -> Tensor:
        self.rows += rows.tolist()
        return native()(logits, rows, *rest)


@functools.cache
def native() -> Any:
    draw: MaskedDraw | None = create(2).ops.draw_allowed
    assert draw is not None
    return draw


def randn(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed)) * 3


def test_tokens_and_log_probabilities_are_those_of_the_plain_transforms() -> None:
    sets = [range(1, WIDTH), [5], [7, 31, 32, 299], range(100, 140), range(1, WIDTH, 2)]
    settings: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.7, "seed": 5},
        {"temperature": 1.3, "seed": 6, "top_k": 3, "logprobs": 3},
        {"temperature": 1.0, "seed": 7, "top_p": 0.8, "min_p": 0.01},
    ]
    rows = [guided(allowed, **asked) for allowed in sets for asked in settings]
    logits = randn(len(rows))
    before = logits.clone()
    watched = Watched()
    for position in range(40):
        for row in rows:
            row.output_position = position
        fast, plain = sample(logits, rows, masked=watched), sample(logits, rows)
        assert fast.token_ids == plain.token_ids and fast.logprobs == plain.logprobs
        assert not fast.errors and not plain.errors
        assert all(token in sets[i // len(settings)] for i, token in enumerate(fast.token_ids))
    assert watched.rows == 40 * list(range(len(rows))) and torch.equal(logits, before)


@pytest.mark.parametrize(
    "asked",
    [
        {"logit_bias": ((3, 50.0),)},
        {"allowed_token_ids": (3, 4)},
        {"bad_words": ((3,),)},
        {"repetition_penalty": 1.5},
        {"min_tokens": 4, "min_tokens_masked_ids": (5,)},
        {"logprobs": 1, "logprobs_mode": "processed"},
        {"forced_token_ids": (9,)},
        {"return_kept_set": True, "logprobs": 0},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_rows_that_ask_for_more_and_rows_without_a_guide_are_not_drawn_there(asked: dict[str, Any]) -> None:
    rows = [
        guided(range(1, 9), seed=1),
        guided(range(1, 9), seed=2, **asked),
        unguided(seed=3),
        unguided(temperature=0.0),
    ]
    watched, logits = Watched(), randn(4, seed=2)
    drawn = sample(logits, rows, masked=watched)
    assert watched.rows == [0]
    plain = sample(logits, rows)
    assert drawn.token_ids == plain.token_ids and drawn.logprobs.keys() == plain.logprobs.keys()


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_row_that_cannot_go_on_fails_alone_and_says_why(temperature: float) -> None:
    logits = randn(5)
    logits[1, 4] = float("nan")
    logits[2, 40:60] = -float("inf")
    allowed: list[Sequence[int] | None] = [range(1, 9), range(1, 9), range(40, 60), None, [8]]
    rows = [guided(tokens, seed=4, temperature=temperature, logprobs=0) for tokens in allowed]
    watched = Watched()
    out = sample(logits, rows, masked=watched)
    assert watched.rows == [0, 2, 4]
    assert out.errors == {
        1: "logits hold NaN",
        2: "no token is left to sample after the grammar, allowed_token_ids, bad_words and min_tokens",
        3: "sampling failed: GrammarError: it is too deep",
    }
    assert out.token_ids[1:] == [NO_TOKEN, NO_TOKEN, NO_TOKEN, 8] and out.logprobs.keys() == {0, 4}
    assert out == sample(logits, rows)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_guide_that_allows_everything_has_no_mask(temperature: float) -> None:
    spec = SamplingSpec(thinking_budget=9, seed=3, temperature=temperature)
    rows = [make_row(spec, [1], 1, WIDTH, CPU, Guide(spec, VOCABULARY, None)) for _ in range(2)]
    watched, logits = Watched(), randn(2, seed=5)
    assert sample(logits, rows, masked=watched).token_ids == sample(logits, rows).token_ids
    assert watched.rows == [0, 1] and rows[0].guide is not None and rows[0].guide.mask is None


def test_what_the_platform_cannot_do_the_transforms_do() -> None:
    def broken(*arguments: Tensor) -> Tensor:
        raise RuntimeError("out of registers")

    rows = [guided(range(20, 90), seed=i) for i in range(3)]
    logits = randn(3, seed=8)
    assert sample(logits, rows, masked=broken) == sample(logits, rows)


class Panic(BaseException):
    """As compiled backends raise it: no `Exception`."""


class Broken(Allowing):
    """A backend with a fault of its own."""

    def __init__(self, error: BaseException) -> None:
        super().__init__([3])
        self._error = error

    def accept(self, token_id: int) -> str | None:
        raise self._error


@pytest.mark.parametrize("error", [ValueError("boom"), Panic("boom")], ids=["error", "panic"])
@pytest.mark.parametrize("look_ahead", [False, True])
def test_a_backend_that_raises_ends_its_row_alone(error: BaseException, look_ahead: bool) -> None:
    """Where a token is taken in, which is in the step of all rows, and on the thread that makes masks."""
    spec = SamplingSpec(seed=0, grammar=SOURCE)
    guide = Guide(spec, VOCABULARY, Broken(error), look_ahead=look_ahead)
    guides = GuidedRows(None)
    guides.drawn(guide)
    guides.ahead()
    guides.wait()
    if not look_ahead:
        guide.accept(3)
    guides.close()
    assert guide.failure == f"its grammar backend failed: {type(error).__name__}: boom"


def test_a_bit_that_no_token_has_is_not_taken_for_the_only_token() -> None:
    spec = SamplingSpec(seed=0, grammar=SOURCE)
    guide = Guide(spec, VOCABULARY, Allowing([WIDTH + 3]), look_ahead=True)
    guide.prepare()
    row = make_row(spec, [1, 2], 2, WIDTH, CPU, guide)
    assert guide.drafts == [] and not guide.knows_next
    for masked in (native(), None):
        drawn = sample(randn(1), [row], masked=masked)
        assert drawn.token_ids == [NO_TOKEN] and drawn.errors[0].startswith("no token is left to sample")
