"""Planted bugs: the kit of grammar backends names the promise that a wrong one breaks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from infer.errors import GrammarError
from infer.plugins import Registry
from infer.plugins.grammar import GrammarSource
from infer.plugins.platform import Probe
from infer.testing.kits import grammar
from planted_bugs import PlantBug, failures, plant_bug, registry

__all__ = ["plant_bug", "registry"]


class BuggyMatcher:
    """llguidance's matcher with one thing wrong."""

    def __init__(self, real: Any, bug: str) -> None:
        self.real, self.bug = real, bug

    def accept(self, token_id: int) -> str | None:
        if self.bug == "takes a token for a byte" and token_id > grammar.NOTHING:
            token_id = grammar.vocabulary().tokens[token_id][0]
        found: str | None = self.real.accept(token_id)
        return found

    def fill(self, mask: bytearray) -> None:
        before = bytes(mask)
        self.real.fill(mask)
        if self.bug == "adds to the mask":
            mask[:] = bytes(new | old for new, old in zip(mask, before, strict=True))
        elif self.bug == "allows special tokens":
            mask[grammar.SPECIAL >> 3] |= 1 << (grammar.SPECIAL & 7)
        elif self.bug == "ends anywhere":
            mask[grammar.EOS >> 3] |= 1 << (grammar.EOS & 7)
        elif self.bug == "forgets an end":
            mask[grammar.OTHER_EOS >> 3] &= ~(1 << (grammar.OTHER_EOS & 7)) & 0xFF
        elif self.bug == "one spelling":
            mask[grammar.NOTHING >> 3 :] = bytes(len(mask) - (grammar.NOTHING >> 3))

    @property
    def can_end(self) -> bool:
        return bool(self.real.can_end)

    @property
    def is_complete(self) -> bool:
        return False if self.bug == "is never complete" else bool(self.real.is_complete)


GRAMMAR_BUGS = [
    ("none", set()),
    ("adds to the mask", {"mask_is_written_whole"}),
    ("allows special tokens", {"ends", "special_tokens"}),
    ("ends anywhere", {"ends"}),
    ("forgets an end", {"ends"}),
    ("one spelling", {"mask_is_brute_force", "ends"}),
    ("is never complete", {"ends"}),
    ("takes a token for a byte", {"long_tokens"}),
    ("shares its state", {"mask_is_brute_force", "ends", "states_are_apart"}),
    ("lets warnings pass", {"refuses_by_name"}),
    ("names nothing", {"refuses_by_name"}),
]


@pytest.mark.row("X-PLUGIN-KIT", "the kit fails six planted plugin bugs")
@pytest.mark.parametrize(("bug", "broken"), GRAMMAR_BUGS, ids=[bug for bug, _ in GRAMMAR_BUGS])
def test_grammar(plant_bug: PlantBug, registry: Registry, bug: str, broken: set[str]) -> None:
    factory = registry.load("grammar", "llguidance")

    class Buggy:
        def __init__(self, vocabulary: Any) -> None:
            self.real = factory(vocabulary)

        def compile(self, source: Any) -> Any:
            try:
                compiled = self.real.compile(source)
            except GrammarError as error:
                if bug == "lets warnings pass" and "not" in source.text:
                    return self.real.compile(GrammarSource(kind="json_schema", text="true"))
                raise GrammarError("no" if bug == "names nothing" else str(error)) from None
            shared = BuggyMatcher(compiled.start(), bug)

            class Made:
                def start(self) -> Any:
                    return shared if bug == "shares its state" else BuggyMatcher(compiled.start(), bug)

            return Made()

    spec = dataclasses.replace(registry.get("grammar", "llguidance"), factory=plant_bug(Buggy))
    assert failures(grammar.checks(spec)) == broken


def test_a_grammar_probe_that_says_no(plant_bug: PlantBug, registry: Registry) -> None:
    spec = dataclasses.replace(
        registry.get("grammar", "llguidance"), probe=plant_bug(lambda: Probe(False, "not here"), "no")
    )
    assert failures(grammar.checks(spec)) == {"probe_says_whether_it_is_here"}
