"""A compiled grammar that has run into its limit of lexer states: the output ends with a reason, the next begins afresh."""

from __future__ import annotations

import random

import pytest

from grammar_vocabularies import wide_vocabulary
from infer import GrammarError
from infer.grammars import llguidance
from infer.plugins.grammar import GrammarSource

WORDS = wide_vocabulary()


def test_a_spent_lexer_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llguidance, "MAX_LEXER_STATES", 600)
    source = GrammarSource(kind="regex", text="[ab]*a[ab]{14}c")
    grammar = llguidance.LLGuidanceBackend(WORDS).compile(source)
    generator, spent = random.Random(1), 0
    for _ in range(12):
        matcher = grammar.start()
        mask = bytearray(WORDS.mask_bytes)
        matcher.fill(mask)  # also right after another output has spent the states
        assert mask[ord("a") >> 3] >> (ord("a") & 7) & 1
        try:
            for _ in range(400):
                refusal = matcher.accept(generator.choice(b"ab"))
                if refusal is not None:
                    raise GrammarError(refusal)
                matcher.fill(mask)
        except GrammarError as error:
            assert "states" in str(error)
            spent += 1
    assert spent > 1, "the limit was never reached, so nothing was tried"
