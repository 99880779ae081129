r"""\d, \w and \s in regular expressions: ASCII alone, but any character where a class has the opposite, too."""

from __future__ import annotations

import pytest

from infer.grammars._regex import ascii_classes
from infer.grammars.llguidance import LLGuidanceBackend
from infer.plugins.grammar import GrammarSource, Vocabulary

BYTES = Vocabulary(
    tokens=[*(bytes([value]) for value in range(256)), b"<end>"],
    special_ids=frozenset({256}),
    eos_token_ids=(256,),
    encode=lambda text: list(text.encode()),
)


@pytest.mark.parametrize("pair", [r"[\s\S]", r"[\W\w]", r"[\d\Da]", r"[]\w\W]"])
@pytest.mark.parametrize("text", ["ü", "\u00a0", "\u3000", "٣", "日", "a", " ", "7", "\n"])
def test_a_class_and_its_opposite_are_any_character(pair: str, text: str) -> None:
    matcher = LLGuidanceBackend(BYTES).compile(GrammarSource(kind="regex", text=f"x{pair}y")).start()
    refusals = [matcher.accept(token_id) for token_id in f"x{text}y".encode()]
    assert refusals == [None] * len(refusals) and matcher.can_end


@pytest.mark.parametrize(
    ("pattern", "written"),
    [
        (r"\w[\w]\W", r"[0-9A-Za-z_][0-9A-Za-z_]\W"),
        (r"[\w\W][\w]", r"[\w\W][0-9A-Za-z_]"),
        (r"[\s\S\d]\d", r"[\s\S0-9][0-9]"),
        (r"[\\w\W]", r"[\\w\W]"),
        (r"[\w\\", "[0-9A-Za-z_\\\\"),
        ("[\\", "[\\"),
    ],
)
def test_what_is_written(pattern: str, written: str) -> None:
    assert ascii_classes(pattern) == written
