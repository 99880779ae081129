"""What a combination is made of: features, their values, and the values that are refused together. Plain data, and one search
for values of the features that nobody fixed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

Scope = Literal["engine", "request"]
Choice = tuple[str, str]
"""(feature, value)."""
Pair = tuple[Choice, Choice]
"""In the order in which the features are declared."""
Row = Mapping[str, str]
"""Feature -> value."""


@dataclass(frozen=True, kw_only=True)
class Value:
    name: str
    asks: Mapping[str, Any] = field(default_factory=dict)
    """Of an engine sections of its settings; of a request arguments, `params` among them."""
    named: tuple[str, ...] = ()
    """How a refusal may call it, instead of as its feature says."""


def setting(section: str, name: str, /, **settings: Any) -> Value:
    """A value that is asked for in a section of what is configured."""
    return Value(name=name, asks={section: settings})


@dataclass(frozen=True, kw_only=True)
class Feature:
    name: str
    scope: Scope
    values: tuple[Value, ...]
    """The plain one first."""
    named: tuple[str, ...]
    """How a refusal may call it: the setting or parameter, one of these."""
    shown: str
    """How it is seen to have been at work."""

    def value(self, name: str) -> Value:
        return next(value for value in self.values if value.name == name)


Refusal = Mapping[str, tuple[str, ...]]
"""Two features, seldom more: every combination of these of their values is refused."""


class Space:
    """All features, and which of their values are refused together."""

    def __init__(self, features: Sequence[Feature], refusals: Sequence[Refusal]) -> None:
        self.features, self.refusals = tuple(features), tuple(refusals)
        self._order = {feature.name: place for place, feature in enumerate(features)}
        known = {(feature.name, value.name) for feature in features for value in feature.values}
        refused = []
        for refusal in refusals:
            names = sorted(refusal, key=self._order.__getitem__)
            for values in product(*(refusal[name] for name in names)):
                refused.append(tuple(zip(names, values, strict=True)))
                if not known.issuperset(refused[-1]):
                    raise ValueError(f"a refusal names {refused[-1]}: one of them is no value of its feature")
        self.refused: tuple[tuple[Choice, ...], ...] = tuple(dict.fromkeys(refused))
        """Each in the order of the features."""
        self._bound = {name for group in self.refused for name, _ in group}
        self._beside: dict[Choice, list[frozenset[Choice]]] = {}
        for group in self.refused:
            for choice in group:
                self._beside.setdefault(choice, []).append(frozenset(group) - {choice})

    def feature(self, name: str) -> Feature:
        return self.features[self._order[name]]

    def of(self, scope: Scope) -> tuple[Feature, ...]:
        return tuple(feature for feature in self.features if feature.scope == scope)

    def pairs(self) -> Iterator[Pair]:
        """All, refused ones too."""
        for place, first in enumerate(self.features):
            for second in self.features[place + 1 :]:
                for one, other in product(first.values, second.values):
                    yield (first.name, one.name), (second.name, other.name)

    def fits(self, row: Row, choice: Choice) -> bool:
        """Whether the choice completes nothing that is refused."""
        return not any(all(row.get(name) == value for name, value in rest) for rest in self._beside.get(choice, ()))

    def completed(self, row: Row, features: Sequence[Feature]) -> dict[str, str] | None:
        """The row with a value for each of the features, the plainest that go; None where there are none. What is refused
        within the row itself is not looked at."""
        found = self._searched(row, [f for f in features if f.name not in row and f.name in self._bound])
        if found is None:
            return None
        return {f.name: found.get(f.name, f.values[0].name) for f in self.features if f in features or f.name in found}

    def _searched(self, row: Row, left: Sequence[Feature]) -> dict[str, str] | None:
        if not left:
            return dict(row)
        # The feature with the fewest values left goes first: a wrong turn shows at once.
        options = {f.name: self._fitting(row, f) for f in left}
        feature = min(left, key=lambda one: len(options[one.name]))
        rest = [one for one in left if one is not feature]
        for value in options[feature.name]:
            found = self._searched({**row, feature.name: value}, rest)
            if found is not None:
                return found
        return None

    def _fitting(self, row: Row, feature: Feature) -> list[str]:
        return [v.name for v in feature.values if self.fits(row, (feature.name, v.name))]

    def stuck(self, row: Row) -> str:
        """Of a row that cannot be completed: the feature of which no value goes, alone or beside the others."""
        for feature in self.features:
            if feature.name not in row and not self._fitting(row, feature):
                return feature.name
        return min((f for f in self.features if f.name not in row), key=lambda f: len(self._fitting(row, f))).name
