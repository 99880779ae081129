"""Cases that together hold every pair of values: an engine's row with a few requests' rows each (a covering array, built row by
row as AETG does: Cohen, Dalal, Fredman, Patton, IEEE Trans. Softw. Eng. 23(7), 1997). Pure; the same for equal arguments."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from combinations.declared import Choice, Feature, Pair, Refusal, Row, Scope, Space

CANDIDATES = 6
"""Rows that are drawn for each one that is taken."""
TRIES = 200
"""Draws that may end where a feature has no value left."""


@dataclass(frozen=True)
class Case:
    """One engine, and the requests that run in it at the same time."""

    row: Row
    requests: tuple[Row, ...]

    def pairs(self, space: Space) -> Iterator[Pair]:
        """What it covers: pairs within the engine's row, and within each request's row together with it."""
        for request in self.requests:
            row = {**self.row, **request}
            yield from combinations([(f.name, row[f.name]) for f in space.features], 2)


def cases(space: Space, dear: Sequence[Refusal] = (), *, num_requests: int = 4, seed: int = 0) -> list[Case]:
    """Until every pair that some row can hold is in one. What is `dear` is in as few as can be, of plain values otherwise."""
    cheap = Space(space.features, (*space.refusals, *dear))
    found = _Search(cheap, seed).run(num_requests)
    covered = {pair for case in found for pair in case.pairs(space)} | set(space.refused)
    for pair in space.pairs():  # what is left is dear, or needs what is
        whole = None if pair in covered else space.completed(dict(pair), space.features)
        if whole is not None:
            found.append(_split(space, whole))
            covered.update(found[-1].pairs(space))
    return found


def _split(space: Space, whole: Row) -> Case:
    engine, request = ({f.name: whole[f.name] for f in space.of(scope)} for scope in ("engine", "request"))
    return Case(engine, (request,))


def random_cases(space: Space, dear: Sequence[Refusal], *, count: int, seed: int) -> Iterator[Case]:
    """Rows of no plan: any values that go together."""
    search = _Search(Space(space.features, (*space.refusals, *dear)), seed)
    for _ in range(count):
        row = search.drawn({}, "engine")
        yield Case(row, tuple(search.drawn(row, "request") for _ in range(3)))


def implied(space: Space) -> dict[Pair, str]:
    """Pairs that no row can hold although they are not refused themselves -> the feature that is left without a value."""
    found = {}
    refused = set(space.refused)
    for pair in space.pairs():
        if pair not in refused and space.completed(dict(pair), space.features) is None:
            found[pair] = space.stuck(dict(pair))
    return found


class _Search:
    """Choices are bits, so that "how many of these are left beside that one" is one operation."""

    def __init__(self, space: Space, seed: int) -> None:
        self._space = space
        self._draw = random.Random(seed)
        choices = [(f.name, v.name) for f in space.features for v in f.values]
        self._bit = {choice: 1 << place for place, choice in enumerate(choices)}
        self._left = dict.fromkeys(choices, 0)
        """Choice -> those that it has not been beside."""
        refused = {group for group in space.refused if len(group) == 2}
        for one, other in space.pairs():
            if (one, other) not in refused:
                self._left[one] |= self._bit[other]
                self._left[other] |= self._bit[one]

    def run(self, num_requests: int) -> list[Case]:
        found = []
        while any(self._left.values()):
            row = self._best({}, "engine")
            requests: list[Row] = []
            gained = 0
            while len(requests) < num_requests:
                request = self._best(row, "request")
                count = self._cover(Case(row, (request,)))
                if not count:
                    break
                gained += count
                requests.append(request)
            if gained:
                found.append(Case(row, tuple(requests)))
            else:
                found += self._last()
        return found

    def _cover(self, case: Case) -> int:
        count = 0
        for one, other in case.pairs(self._space):
            if self._left[one] & self._bit[other]:
                self._left[one] &= ~self._bit[other]
                self._left[other] &= ~self._bit[one]
                count += 1
        return count

    def _last(self) -> list[Case]:
        """A case for a pair that drawing did not come to; none for one that no row can hold."""
        one = next(choice for choice, left in self._left.items() if left)
        other = next(choice for choice, bit in self._bit.items() if self._left[one] & bit)
        whole = self._space.completed(dict((one, other)), self._space.features)
        if whole is None:
            self._left[one] &= ~self._bit[other]
            self._left[other] &= ~self._bit[one]
            return []
        case = _split(self._space, whole)
        self._cover(case)
        return [case]

    def _best(self, base: Row, scope: Scope) -> dict[str, str]:
        """Of some rows the one with most pairs that are left, and a chance for what comes beside it."""
        drawn = [self.drawn(base, scope) for _ in range(CANDIDATES)]

        def worth(row: dict[str, str]) -> float:
            mask = sum(self._bit[item] for item in [*base.items(), *row.items()])
            left = [self._left[item] for item in row.items()]
            return sum((one & mask).bit_count() for one in left) + sum(one.bit_count() for one in left) / 50

        return max(drawn, key=worth)

    def drawn(self, base: Row, scope: Scope) -> dict[str, str]:
        for _ in range(TRIES):
            row = self._try(base, self._space.of(scope))
            if row is not None:
                return row
        raise ValueError(f"beside {dict(base)} there is no value for every feature")

    def _try(self, base: Row, features: Sequence[Feature]) -> dict[str, str] | None:
        """Begins with a choice that has much left; then feature by feature the value with most left beside the row."""
        mask = sum(self._bit[item] for item in base.items())
        choices = [(f.name, v.name) for f in features for v in f.values if self._space.fits(base, (f.name, v.name))]
        weights = [1 + 10 * (self._left[c] & mask).bit_count() + self._left[c].bit_count() for c in choices]
        first = self._draw.choices(choices, [weight**2 for weight in weights])[0]
        row, taken = {**base, first[0]: first[1]}, {first[0]: first[1]}
        mask |= self._bit[first]
        for feature in self._draw.sample(features, len(features)):
            if feature.name in taken:
                continue
            best = self._value(row, feature, mask)
            if best is None:
                return None
            row[best[0]] = taken[best[0]] = best[1]
            mask |= self._bit[best]
        return taken

    def _value(self, row: Row, feature: Feature, mask: int) -> Choice | None:
        fitting = [(feature.name, v.name) for v in feature.values if self._space.fits(row, (feature.name, v.name))]
        if not fitting:
            return None
        return max(
            fitting,
            key=lambda c: ((self._left[c] & mask).bit_count(), self._left[c].bit_count(), self._draw.random()),
        )
