"""Token masks against brute force over the vocabulary: a token is allowed exactly if a byte-wise walk of its text is.

The walk uses one-byte tokens alone, whose masks are checked against Python's own `json`, `re` and lists of texts.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grammar_vocabularies import wide_vocabulary
from infer.config.engine import PluginsSection
from infer.plugins import build_registry
from infer.plugins.grammar import Grammar, GrammarBackend, GrammarSource, Matcher, Vocabulary

CORE = "TOOLS-STRUCTURED-CORE"
VOCABULARY = wide_vocabulary()
BYTES = Vocabulary(
    tokens=[*(bytes([byte]) for byte in range(256)), b"</s>"],
    special_ids=frozenset({256}),
    eos_token_ids=(256,),
    encode=lambda text: list(text.encode()),
)
SOURCES = [
    GrammarSource(kind="regex", text=r"(ab|a[b-d]{0,3}x)*(\(\)|[0-9]+\.[0-9]{2})"),
    GrammarSource(kind="regex", text="[^<]*"),
    GrammarSource(kind="choice", text='["abc", "ab", "name", "é日", ""]'),
    GrammarSource(kind="json_schema", text='{"type":"object"}'),
    GrammarSource(kind="json_schema", text='{"type":"object"}', compact=True),
    GrammarSource(kind="json_schema", text='{"type":"array","items":{"type":"number","minimum":-3.5,"maximum":120}}'),
    GrammarSource(
        kind="json_schema",
        text='{"type":"object","properties":{"name":{"type":"string","maxLength":4},"age":{"type":"integer","multipleOf":3},'
        '"id":{"enum":["ab","abc",12,null]}},"required":["age"],"additionalProperties":false}',
    ),
    GrammarSource(kind="json_schema", text='{"type":"string","pattern":"^[a-zé]{2,5}$"}'),
    GrammarSource(kind="grammar", text='start: expr\nexpr: expr "+" term | term\nterm: /[0-9]+/ | "(" expr ")"'),
    GrammarSource(
        kind="structural_tag",
        text='{"type":"structural_tag","structures":[{"begin":"<fn=ab>","schema":{"type":"array","items":{"type":"boolean"}},'
        '"end":"</fn>"}],"triggers":["<fn"]}',
    ),
]


@pytest.fixture(scope="module")
def compiled() -> list[tuple[Grammar, Grammar]]:
    """(over the wide vocabulary, over bytes alone) of each source."""
    registry = build_registry(PluginsSection(allow=()))
    wide: GrammarBackend = registry.create("grammar", "llguidance", VOCABULARY)
    plain: GrammarBackend = registry.create("grammar", "llguidance", BYTES)
    return [(wide.compile(source), plain.compile(source)) for source in SOURCES]


def allowed(matcher: Matcher, vocabulary: Vocabulary) -> set[int]:
    mask = bytearray(b"\xaa" * vocabulary.mask_bytes)  # what was there before must not shine through
    matcher.fill(mask)
    assert len(mask) == vocabulary.mask_bytes
    assert not any(mask[i >> 3] >> (i & 7) & 1 for i in range(len(vocabulary.tokens), 8 * len(mask)))
    return {i for i in range(len(vocabulary.tokens)) if mask[i >> 3] >> (i & 7) & 1}


def walk(grammar: Grammar, data: bytes) -> Matcher | None:
    """The matcher behind these bytes, or None when they do not fit."""
    matcher = grammar.start()
    for byte in data:
        if byte not in allowed(matcher, BYTES) or matcher.accept(byte) is not None:
            return None
    return matcher


@pytest.mark.row(CORE, "the token mask equals brute force over the vocabulary at random states")
@given(data=st.data())
def test_a_mask_is_what_brute_force_says(data: st.DataObject, compiled: list[tuple[Grammar, Grammar]]) -> None:
    index = data.draw(st.integers(0, len(SOURCES) - 1))
    grammar, plain = compiled[index]
    matcher, text = grammar.start(), b""
    for _ in range(data.draw(st.integers(0, 25))):
        choices = sorted(allowed(matcher, VOCABULARY) - VOCABULARY.special_ids)
        if not choices:
            break
        token_id = data.draw(st.sampled_from(choices))
        assert matcher.accept(token_id) is None
        text += VOCABULARY.tokens[token_id]
    here = walk(plain, text)
    assert here is not None, f"{text!r} was allowed token by token, and is not byte by byte"
    prefixes: dict[bytes, bool] = {b"": True}

    def fits(piece: bytes) -> bool:
        if piece not in prefixes:
            if not fits(piece[:-1]):
                prefixes[piece] = False
            else:
                before = walk(plain, text + piece[:-1])
                prefixes[piece] = before is not None and piece[-1] in allowed(before, BYTES)
        return prefixes[piece]

    expected = {
        i for i, piece in enumerate(VOCABULARY.tokens) if piece and i not in VOCABULARY.special_ids and fits(piece)
    }
    if here.can_end:
        expected |= set(VOCABULARY.eos_token_ids)
    assert allowed(matcher, VOCABULARY) == expected
    assert matcher.can_end is here.can_end
    assert matcher.is_complete is (here.can_end and expected == set(VOCABULARY.eos_token_ids))


def is_prefix_of_choice(text: bytes) -> bool:
    return any(choice.encode().startswith(text) for choice in json.loads(SOURCES[2].text))


@given(text=st.text("ab(cdx)012.é", max_size=9), extra=st.sampled_from(["", "()", "12.34", "x()"]))
def test_bytes_are_what_python_says(text: str, extra: str, compiled: list[tuple[Grammar, Grammar]]) -> None:
    """The walk itself: whole texts against `re`, `json` and the list of choices."""
    said = text + extra
    matcher = walk(compiled[0][1], said.encode())
    assert (matcher is not None and matcher.can_end) is bool(re.fullmatch(SOURCES[0].text, said))
    matcher = walk(compiled[2][1], said.encode())
    assert (matcher is not None and matcher.can_end) is (said in json.loads(SOURCES[2].text))
    assert (matcher is not None) is is_prefix_of_choice(said.encode())


numbers = st.integers(-(10**6), 10**6) | st.floats(-1e6, 1e6, allow_nan=False).map(lambda x: round(x, 3))
json_values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(value=json_values, indent=st.sampled_from([None, 0, 2]), ascii_only=st.just(False))
def test_json_objects_are_what_python_writes(
    value: Any, indent: int | None, ascii_only: bool, compiled: list[tuple[Grammar, Grammar]]
) -> None:
    text = json.dumps({"value": value}, indent=indent, ensure_ascii=ascii_only)
    if "\x7f" in text:
        return
    matcher = walk(compiled[3][1], text.encode())
    assert matcher is not None, text
    assert matcher.can_end
    assert walk(compiled[3][1], text.encode()[:-1] + b"]") is None
