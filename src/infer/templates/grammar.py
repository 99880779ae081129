"""A grammar backend for one kind of grammar, "choice": the answer is one of the given texts.

`compile` runs in a thread beside the event loop, matchers on the worker thread and the one that fills masks ahead.
"""

from __future__ import annotations

import json

from infer import GrammarError
from infer.plugins import GrammarSource, GrammarSpec, Matcher, Probe, Vocabulary, hookimpl

MOST_BYTES = 100_000


class ChoiceMatcher:
    """Where one output stands: the choices that are left, and how many of their bytes are written."""

    def __init__(self, grammar: ChoiceGrammar) -> None:
        self._words, self._left, self._written, self._ended = grammar.words, grammar.choices, 0, False

    def accept(self, token_id: int) -> str | None:
        if self._ended:
            return "the output has ended"
        if token_id in self._words.eos_token_ids:
            self._ended = self.can_end
            return None if self._ended else "the output may not end here"
        piece = self._piece(token_id)
        left = [choice for choice in self._left if piece and choice.startswith(piece, self._written)]
        if not left:
            return f"no choice goes on with {piece!r}"
        self._left, self._written = left, self._written + len(piece)
        return None

    def fill(self, mask: bytearray) -> None:
        mask[:] = bytes(self._words.mask_bytes)
        for token_id in range(len(self._words.tokens)):
            piece = self._piece(token_id)
            if piece and not self._ended and any(choice.startswith(piece, self._written) for choice in self._left):
                mask[token_id >> 3] |= 1 << (token_id & 7)
        for token_id in self._words.eos_token_ids if self.can_end else ():
            mask[token_id >> 3] |= 1 << (token_id & 7)

    @property
    def can_end(self) -> bool:
        return any(len(choice) == self._written for choice in self._left)

    @property
    def is_complete(self) -> bool:
        return all(len(choice) == self._written for choice in self._left)

    def _piece(self, token_id: int) -> bytes:
        """What an id adds; special tokens are never ordinary text."""
        known = 0 <= token_id < len(self._words.tokens) and token_id not in self._words.special_ids
        return self._words.tokens[token_id] if known else b""


class ChoiceGrammar:
    def __init__(self, words: Vocabulary, choices: list[bytes]) -> None:
        self.words, self.choices = words, choices

    def start(self) -> Matcher:
        return ChoiceMatcher(self)


class ChoiceBackend:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def compile(self, source: GrammarSource) -> ChoiceGrammar:
        if source.kind != "choice":
            raise GrammarError(f"my-name compiles grammars of the kind 'choice', not {source.kind!r}")
        choices = json.loads(source.text)
        if not choices or not all(choices):
            raise GrammarError("a choice needs texts, none of them empty")
        if sum(map(len, choices)) > MOST_BYTES:
            raise GrammarError(f"the choices have more than {MOST_BYTES} characters together")
        return ChoiceGrammar(self._vocabulary, sorted({choice.encode() for choice in choices}))


def probe() -> Probe:
    return Probe(True)


@hookimpl
def infer_grammars() -> list[GrammarSpec]:
    colours = json.dumps(["red", "green", "greenish"])
    return [
        GrammarSpec(
            name="my-name",
            api=1,
            factory=f"{__name__}:ChoiceBackend",
            probe=f"{__name__}:probe",
            kinds=("choice",),
            priority=-10,  # after the built-in one: used where the configuration names it
            example={
                "accepts": [["choice", colours, "green"], ["choice", json.dumps(["été", "日本"]), "日本"]],
                "rejects": [["choice", colours, "gre"], ["choice", colours, "blue"]],
                "refused": [["choice", "[]", "texts"], ["regex", "a+", "regex"]],
            },
        )
    ]
