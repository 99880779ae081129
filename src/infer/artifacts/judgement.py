"""Compares what a rollout recorded with what a model says of the same tokens: equal, near tie, or wrong, place by place.

Pure functions over arrays, for `infer verify` and for trainers; owns nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from infer.artifacts.generation import RoutedExperts
from infer.errors import ArtifactError

Verdict = Literal["equal", "near tie", "wrong"]
VERDICTS: tuple[Verdict, ...] = ("equal", "near tie", "wrong")
EQUAL, NEAR, WRONG = range(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How far two correct programs may be apart. Natural log units.

    Two values of a token count as equal within `equal`, and as a near tie within `near` + `relative` * |value|: the less
    likely a token, the further below the others its logit, and rounding grows with the distance.
    """

    equal: float = 1e-5
    near: float
    relative: float = 0.0
    mean: float
    """Of the deviations of a choice's log-probabilities. Rounding averages out, a defect does not: this finds one that stays
    below `near` everywhere."""
    route_flips: float = 0.0
    """Share of (row, layer) places where other experts may have been chosen. The artifact holds no router logits, so that a
    near tie of the router cannot be told from a defect in a single place, only by how rare it is."""

    @classmethod
    def of(cls, *dtypes: str) -> Self:
        """Of the coarsest of float32, float16 and bfloat16 that a program computed in. Raises `ArtifactError` for others."""
        for dtype in dtypes:
            if dtype not in _TOLERANCES:
                raise ArtifactError(f"there is no tolerance for {dtype!r}; there are {', '.join(_TOLERANCES)}")
        return cls(**_TOLERANCES[max(dtypes, key=list(_TOLERANCES).index)])


_TOLERANCES: dict[str, dict[str, float]] = {
    "float32": {"near": 1e-3, "relative": 1e-4, "mean": 2e-4},
    "float16": {"near": 0.05, "relative": 0.005, "mean": 0.015, "route_flips": 0.02},
    "bfloat16": {"near": 0.25, "relative": 0.03, "mean": 0.08, "route_flips": 0.1},
}
"""From fine to coarse. SmolLM2-135M in bfloat16 against float32: at most 0.16, mean 0.02."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One place where the two do not agree."""

    position: int
    """Of the token in the sequence; of a route the token that was fed."""
    token_id: int
    recorded: Any
    """A token id, a log-probability, or the experts of one layer."""
    ours: Any
    deviation: float | None = None
    """|recorded - ours|; of a token how far its log-probability is below that of ours."""
    layer: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Of one kind of fact over one choice."""

    verdict: Verdict
    equal: int
    near: int
    wrong: int
    near_positions: tuple[int, ...] = ()
    wrong_positions: tuple[int, ...] = ()
    first: Difference | None = None
    """The first place that is not equal."""
    first_wrong: Difference | None = None
    max_deviation: float | None = None
    mean_deviation: float | None = None

    @property
    def checked(self) -> int:
        return self.equal + self.near + self.wrong


def judge_tokens(
    token_ids: ArrayLike, best_ids: ArrayLike, gaps: ArrayLike, start: int, tolerance: Tolerance
) -> Judgement:
    """Greedy choices [n] against our best ids [n]; `gaps` [n] are our best log-probability minus the recorded token's."""
    tokens, best, gap = np.asarray(token_ids), np.asarray(best_ids), np.asarray(gaps, dtype=np.float64)
    codes = np.where(tokens == best, EQUAL, np.where(gap <= tolerance.near, NEAR, WRONG))
    return _judgement(
        codes,
        start + np.arange(len(tokens)),
        lambda n: Difference(
            position=start + n,
            token_id=int(tokens[n]),
            recorded=int(tokens[n]),
            ours=int(best[n]),
            deviation=float(gap[n]),
        ),
        np.where(tokens == best, 0.0, gap),
    )


def judge_logprobs(
    token_ids: ArrayLike, recorded: ArrayLike, ours: ArrayLike, start: int, tolerance: Tolerance
) -> Judgement:
    """Log-probabilities [n] of the tokens [n] that begin at position `start`. Not finite on either side is wrong, and so is
    a choice whose mean deviation is too large although no single one is."""
    tokens = np.asarray(token_ids)
    theirs, mine = (np.asarray(values, dtype=np.float64) for values in (recorded, ours))
    if not len(tokens) == len(theirs) == len(mine):
        raise ArtifactError(f"{len(theirs)} recorded and {len(mine)} own log-probabilities for {len(tokens)} tokens")
    with np.errstate(invalid="ignore"):
        deviation = np.abs(theirs - mine)
    limit = tolerance.near + tolerance.relative * np.minimum(np.abs(theirs), np.abs(mine))
    codes = np.where(deviation <= tolerance.equal, EQUAL, np.where(deviation <= limit, NEAR, WRONG))
    judged = _judgement(
        codes,
        start + np.arange(len(tokens)),
        lambda n: Difference(
            position=start + n,
            token_id=int(tokens[n]),
            recorded=float(theirs[n]),
            ours=float(mine[n]),
            deviation=float(deviation[n]),
        ),
        deviation,
    )
    drifts = judged.mean_deviation is not None and judged.mean_deviation > tolerance.mean
    return replace(judged, verdict="wrong") if drifts else judged


def judge_routes(token_ids: ArrayLike, recorded: RoutedExperts, ours: RoutedExperts, tolerance: Tolerance) -> Judgement:
    """Experts in the router's order, over the rows that both hold. Equal: the same ids in the same order. Near tie: the same
    ids in another order, and other ids while they are no more than `tolerance.route_flips` of all places."""
    tokens = np.asarray(token_ids)
    theirs, mine, start = _aligned(recorded, ours)
    rows, layers, _ = theirs.shape
    same_order = (theirs == mine).all(axis=-1)
    same_set = (np.sort(theirs, axis=-1) == np.sort(mine, axis=-1)).all(axis=-1)
    flips = np.count_nonzero(~same_set)
    flipped = NEAR if flips <= tolerance.route_flips * rows * layers else WRONG
    codes = np.where(same_order, EQUAL, np.where(same_set, NEAR, flipped)).reshape(-1)

    def difference(n: int) -> Difference:
        row, router = divmod(n, layers)
        return Difference(
            position=start + row,
            token_id=int(tokens[start + row]),
            recorded=theirs[row, router].tolist(),
            ours=mine[row, router].tolist(),
            layer=int(recorded.router_ids[router]),
        )

    return _judgement(codes, start + np.arange(rows * layers) // max(layers, 1), difference, None)


def worst(judgements: Sequence[Judgement | None]) -> Verdict:
    """The worst verdict of those that were made."""
    return VERDICTS[max((VERDICTS.index(one.verdict) for one in judgements if one is not None), default=EQUAL)]


def _aligned(recorded: RoutedExperts, ours: RoutedExperts) -> tuple[NDArray[Any], NDArray[Any], int]:
    """Both as [rows, layers, experts] over the same layers and positions, and the first position."""
    theirs, mine = np.asarray(recorded.expert_ids), np.asarray(ours.expert_ids)
    known = {int(layer): place for place, layer in enumerate(ours.router_ids)}
    missing = [int(layer) for layer in recorded.router_ids if int(layer) not in known]
    if missing or theirs.shape[-1] != mine.shape[-1]:
        raise ArtifactError(
            f"the artifact has routers in layers {_short(recorded.router_ids)} that choose {theirs.shape[-1]} experts, "
            f"this model in layers {_short(ours.router_ids)} that choose {mine.shape[-1]}: it is another model"
        )
    mine = mine[:, [known[int(layer)] for layer in recorded.router_ids]]
    start = max(recorded.token_start, ours.token_start)
    end = min(recorded.token_start + len(theirs), ours.token_start + len(mine))
    if end < recorded.token_start + len(theirs):
        raise ArtifactError(
            f"the artifact has routes up to position {recorded.token_start + len(theirs)}, the replay up to {end}"
        )
    return theirs[start - recorded.token_start :], mine[start - ours.token_start : end - ours.token_start], start


def _short(layers: Sequence[int]) -> str:
    shown = ", ".join(str(int(layer)) for layer in layers[:8])
    return shown + (", ..." if len(layers) > 8 else "")


def _judgement(
    codes: NDArray[Any],
    positions: NDArray[Any],
    difference: Callable[[int], Difference],
    deviation: NDArray[Any] | None,
) -> Judgement:
    """`codes` [n] of the places, in order, and their positions [n]."""
    differing, wrong = np.flatnonzero(codes != EQUAL), np.flatnonzero(codes == WRONG)
    return Judgement(
        verdict=VERDICTS[int(codes.max(initial=EQUAL))],
        equal=len(codes) - len(differing),
        near=len(differing) - len(wrong),
        wrong=len(wrong),
        near_positions=tuple(np.unique(positions[codes == NEAR]).tolist()),
        wrong_positions=tuple(np.unique(positions[wrong]).tolist()),
        first=difference(int(differing[0])) if len(differing) else None,
        first_wrong=difference(int(wrong[0])) if len(wrong) else None,
        max_deviation=float(deviation.max()) if deviation is not None and len(deviation) else None,
        mean_deviation=float(deviation.mean()) if deviation is not None and len(deviation) else None,
    )
