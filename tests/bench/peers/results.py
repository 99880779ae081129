"""What the rounds found, by engine and work: medians, spread, the best peer, ratios round by round. Pure; plain data."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from .targets import LOWER_IS_BETTER, Target


@dataclass(frozen=True)
class Spread:
    """Median with the lowest and highest beside it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        found = list(values)
        return cls(statistics.median(found), min(found), max(found))


@dataclass
class Outcome:
    """One engine with one form of the weights, over all rounds."""

    engine: str
    weights: str
    weight_class: str
    rounds: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By number of the round: the object that the driver printed."""
    failures: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.engine} {self.weights}"

    def by_round(self, work_name: str) -> dict[int, float]:
        """The median of each round's samples; of memory, what the round noted."""
        if work_name == "peak_rss":
            return {
                number: found["facts"][work_name]
                for number, found in self.rounds.items()
                if work_name in found["facts"]
            }
        sampled = {number: found["samples"].get(work_name) for number, found in self.rounds.items()}
        return {number: statistics.median(values) for number, values in sampled.items() if values}

    def spread(self, work_name: str) -> Spread | None:
        values = self.by_round(work_name).values()
        return Spread.of(values) if values else None

    def fact(self, name: str) -> float | None:
        values = [found["facts"][name] for found in self.rounds.values() if name in found["facts"]]
        return statistics.median(values) if values else None


def better(work_name: str) -> Callable[[Iterable[float]], float]:
    return min if work_name in LOWER_IS_BETTER else max


def best(peers: Iterable[Outcome], work_name: str) -> Outcome | None:
    """The one with the best median; None where nobody did this work."""
    found = [(spread.median, peer) for peer in peers if (spread := peer.spread(work_name)) is not None]
    if not found:
        return None
    wanted = better(work_name)(median for median, _ in found)
    return next(peer for median, peer in found if median == wanted)


def ratio(ours: Outcome, peer: Outcome, work_name: str) -> Spread | None:
    """How many times better than the peer we are, of the rounds that both took part in."""
    mine, theirs = ours.by_round(work_name), peer.by_round(work_name)
    lower = work_name in LOWER_IS_BETTER
    pairs = [(mine[number], theirs[number]) for number in mine if number in theirs]
    return Spread.of(b / a if lower else a / b for a, b in pairs) if pairs else None


def rivals(ours: Outcome, outcomes: Iterable[Outcome], target: Target | None) -> list[Outcome]:
    """The peers that a target compares with; without one, those of the same weight class."""
    peers = [outcome for outcome in outcomes if outcome.engine != "infer"]
    against = "class" if target is None else target.against
    if against == "class":
        return [peer for peer in peers if peer.weight_class == ours.weight_class]
    if against == "same":
        return [peer for peer in peers if peer.engine == "llama.cpp" and peer.weights == ours.weights]
    return [peer for peer in peers if peer.engine == against]
