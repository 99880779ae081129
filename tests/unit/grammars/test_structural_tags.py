"""Structural tags: inside a tag the mask is the inner grammar's, outside everything but what would pass a trigger by."""

from __future__ import annotations

import json
from typing import Any

import pytest

from grammar_vocabularies import wide_vocabulary
from infer import GrammarError
from infer.grammars.llguidance import LLGuidanceBackend
from infer.plugins.grammar import GrammarSource, Matcher

ROW = "TOOLS-STRUCTURAL-TAG"
WORDS = wide_vocabulary()
TOOL = WORDS.tokens.index(b"<tool>")
BACKEND = LLGuidanceBackend(WORDS)
INNER = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}},
    "additionalProperties": False,
}


def tags(**changes: Any) -> dict[str, Any]:
    content = {"type": "json_schema", "json_schema": INNER}
    base = {
        "type": "triggered_tags",
        "triggers": ["<fn="],
        "tags": [
            {"begin": "<fn=x>", "content": content, "end": "</fn>"},
            {"type": "tag", "begin": "<fn=text>", "content": {"type": "any_text"}, "end": ["</fn>", "</end>"]},
        ],
    }
    return {"type": "structural_tag", "format": base | changes}


def behind(asked: dict[str, Any], *pieces: str | int) -> Matcher | None:
    """The matcher behind these texts and token ids; None when one does not fit."""
    matcher = BACKEND.compile(GrammarSource(kind="structural_tag", text=json.dumps(asked))).start()
    for token_id in [i for piece in pieces for i in ([piece] if isinstance(piece, int) else piece.encode())]:
        if token_id not in allowed(matcher) or matcher.accept(token_id) is not None:
            return None
    return matcher


def allowed(matcher: Matcher | None) -> set[int]:
    assert matcher is not None
    mask = bytearray(WORDS.mask_bytes)
    matcher.fill(mask)
    return {i for i in range(len(WORDS.tokens)) if mask[i >> 3] >> (i & 7) & 1}


@pytest.mark.row(ROW, "inside a tag the mask equals that of the inner grammar")
@pytest.mark.parametrize("said", ["", "{", '{"', '{"a":', '{"a": 1', '{"a":12,', '{"a":12,"b":t', "{ \n"])
def test_inside_a_tag_the_mask_is_the_inner_grammars(said: str) -> None:
    inner = BACKEND.compile(GrammarSource(kind="json_schema", text=json.dumps(INNER))).start()
    for byte in said.encode():
        assert inner.accept(byte) is None
    here = behind(tags(), "some text <fn=x>", said)
    assert allowed(here) == allowed(inner)


@pytest.mark.row(ROW, "outside it is all ones except for the trigger rules")
@pytest.mark.parametrize("said", ["", "hello", "a < b", "<f", "<fn", '<fn=x>{"a":1}</fn>', "<fn=x>{}</fn> and more"])
def test_outside_everything_is_allowed_but_passing_a_trigger_by(said: str) -> None:
    here = behind(tags(), said)
    found = allowed(here)
    assert here is not None and here.can_end
    text = [i for i, piece in enumerate(WORDS.tokens) if piece and i not in WORDS.special_ids]
    for token_id in text:
        after = said.encode().rpartition(b"</fn>")[2] + WORDS.tokens[token_id]
        try:
            after.decode()
        except UnicodeDecodeError:
            continue  # half a character, or none
        _, trigger, rest = after.partition(b"<fn=")
        passed_by = trigger and not (b"x>{".startswith(rest) or b"text>".startswith(rest))
        assert (token_id in found) is not bool(passed_by), WORDS.tokens[token_id]


ONE = {"type": "const_string", "value": "a"}
TWO = {"type": "const_string", "value": "b"}
THREE = {"type": "const_string", "value": "c"}
NUMBER = {"begin": "[", "content": {"type": "regex", "pattern": "[0-9]+"}, "end": "]"}
NULL = {"begin": "<f>", "schema": {"type": "null"}, "end": "</f>"}
ACCEPTED: list[tuple[dict[str, Any], list[str | int], bool]] = [
    (tags(), ["text ", '<fn=x>{"a":1}</fn>', " more ", "<fn=text>any < thing</end>", "."], True),
    (tags(), ["<fn=x>{"], False),
    (tags(at_least_one=True), ['<fn=x>{"a":1}</fn>', " more"], True),
    (tags(at_least_one=True, stop_after_first=True), ["<fn=text>a</fn>"], True),
    (tags(stop_after_first=True), ["just text"], True),
    (tags(excludes=["forbidden"]), ["for", "bid"], True),
    ({"type": "structural_tag", "structures": [NULL], "triggers": ["<"]}, ["a<f>null</f>b"], True),
    ({"format": {"type": "const_string", "value": "done"}}, ["done"], True),
    ({"format": {"type": "tags_with_separator", "tags": [NUMBER], "separator": ","}}, ["[1],[22],[3]"], True),
    (
        {
            "format": {
                "type": "sequence",
                "elements": [
                    {"type": "optional", "content": ONE},
                    {"type": "plus", "content": TWO},
                    {"type": "star", "content": THREE},
                ],
            }
        },
        ["bb"],
        True,
    ),
    (
        {"format": {"type": "repeat", "min": 2, "max": 3, "content": {"type": "const_string", "value": "ab"}}},
        ["abab"],
        True,
    ),
    (
        {
            "format": {
                "type": "or",
                "elements": [
                    {"type": "grammar", "grammar": 'root ::= "q" root | "r"'},
                    {"type": "grammar", "syntax": "lark", "grammar": 'start: "z"'},
                ],
            }
        },
        ["qqr"],
        True,
    ),
    (
        {
            "format": {
                "type": "triggered_tags",
                "triggers": ["<tool>"],
                "tags": [{"begin": "<tool>", "content": {"type": "json_schema", "json_schema": INNER}, "end": ";"}],
            }
        },
        ["text", TOOL, '{"a":1};'],
        True,
    ),
]


@pytest.mark.parametrize(("asked", "pieces", "ends"), ACCEPTED, ids=[str(i) for i in range(len(ACCEPTED))])
def test_what_the_formats_mean(asked: dict[str, Any], pieces: list[str | int], ends: bool) -> None:
    here = behind(asked, *pieces)
    assert here is not None
    assert here.can_end is ends


REJECTED: list[tuple[dict[str, Any], list[str | int]]] = [
    (tags(), ["<fn=y"]),
    (tags(), ['<fn=x>{"a":"']),
    (tags(at_least_one=True), ["text"]),
    (tags(at_least_one=True, stop_after_first=True), ["<fn=text>a</fn>b"]),
    (tags(excludes=["forbidden"]), ["it is forbidden"]),
    (tags(), [TOOL]),
    (
        {"format": {"type": "repeat", "min": 2, "max": 3, "content": {"type": "const_string", "value": "ab"}}},
        ["abababa"],
    ),
]


@pytest.mark.parametrize(("asked", "pieces"), REJECTED, ids=[str(i) for i in range(len(REJECTED))])
def test_what_they_do_not(asked: dict[str, Any], pieces: list[str | int]) -> None:
    assert behind(asked, *pieces) is None


REFUSED: list[tuple[Any, str]] = [
    ({"format": {"type": "token", "token": 3}}, "token"),
    ({"format": {"type": "any_text", "max_tokens": 5}}, "any_text.max_tokens"),
    ({"format": {"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}}, "json_schema.style"),
    ({"format": {"type": "json_schema", "json_schema": {"not": {}}}}, "not"),
    ({"format": {"type": "const_string", "value": "a", "extra": 1}}, "const_string.extra"),
    ({"format": {"type": "regex", "pattern": "("}}, "unclosed"),
    ({"format": {"type": "or", "elements": []}}, "empty"),
    ({"format": {"type": "tag", "begin": "a", "content": {"type": "any_text"}}}, "'end'"),
    (tags(triggers=["<other"]), "exactly one"),
    (tags(triggers=["<fn=", "<x"]), "no tag begins"),
    ({"type": "other", "format": {}}, "other"),
    ({}, "'format'"),
    ([], "object"),
]


@pytest.mark.parametrize(("asked", "word"), REFUSED, ids=[word for _, word in REFUSED])
def test_what_is_not_understood_is_refused_by_name(asked: Any, word: str) -> None:
    with pytest.raises(GrammarError) as refused:
        BACKEND.compile(GrammarSource(kind="structural_tag", text=json.dumps(asked)))
    assert word in str(refused.value)
