"""The xgrammar backend with its package: masks are the library's own, and structural tags mean what llguidance's mean."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
import xgrammar

import schema_campaign
from grammar_vocabularies import wide_vocabulary
from infer import GrammarError
from infer.grammars.llguidance import LLGuidanceBackend
from infer.grammars.xgrammar import XGrammarBackend
from infer.plugins.grammar import GrammarBackend, GrammarSource, Matcher
from schema_cases import accepted_cases

XGRAMMAR, TAG = "TOOLS-XGRAMMAR", "TOOLS-STRUCTURAL-TAG"
WORDS = wide_vocabulary()
ENDS = set(WORDS.eos_token_ids)
TOOL = WORDS.tokens.index(b"<tool>")


@pytest.fixture(scope="module")
def backend() -> XGrammarBackend:
    return XGrammarBackend(WORDS)


@pytest.fixture(scope="module")
def other() -> LLGuidanceBackend:
    return LLGuidanceBackend(WORDS)


class Own:
    """The library as its documentation uses it, without our wrapper."""

    def __init__(self) -> None:
        tokens = [b"" if i in WORDS.special_ids else token for i, token in enumerate(WORDS.tokens)]
        self.info = xgrammar.TokenizerInfo(tokens, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=sorted(ENDS))
        self.compiler = xgrammar.GrammarCompiler(self.info)

    def matcher(self, source: GrammarSource) -> Any:
        compiler, text = self.compiler, source.text
        if source.kind == "json_schema":
            layout = (
                {"any_whitespace": False, "separators": (",", ":")} if source.compact else {"max_whitespace_cnt": 128}
            )
            return xgrammar.GrammarMatcher(compiler.compile_json_schema(text, strict_mode=False, **layout))
        if source.kind == "structural_tag":
            return xgrammar.GrammarMatcher(compiler.compile_structural_tag(json.loads(text)))
        if source.kind == "regex":
            return xgrammar.GrammarMatcher(compiler.compile_regex(text))
        return xgrammar.GrammarMatcher(compiler.compile_grammar(text))

    def allowed(self, matcher: Any) -> set[int]:
        bits = xgrammar.allocate_token_bitmask(1, len(WORDS.tokens))
        matcher.fill_next_token_bitmask(bits)
        words = [word & 0xFFFFFFFF for word in bits[0].tolist()]
        return {i for i in range(len(WORDS.tokens)) if words[i // 32] >> (i % 32) & 1}


def allowed(matcher: Matcher) -> set[int]:
    return set(schema_campaign.allowed_ids(matcher))


def tags(schema: Any) -> dict[str, Any]:
    content = {"type": "json_schema", "json_schema": schema}
    tag = {"type": "tag", "begin": "<fn=x>", "content": content, "end": "</fn>"}
    return {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<fn="], "tags": [tag]}}


def sources(backend: XGrammarBackend) -> list[GrammarSource]:
    """Everything of the schema set that is taken, in both layouts, and the other kinds."""
    found = [
        GrammarSource(kind="json_schema", text=json.dumps(schema), compact=compact)
        for _, schema, _ in accepted_cases()
        for compact in (False, True)
    ]
    found += [
        GrammarSource(kind="structural_tag", text=json.dumps(tags(schema))) for _, schema, _ in accepted_cases()[::9]
    ]
    found += [GrammarSource(kind="regex", text=text) for text in (r"[a-c]{2,5}-[0-9]{3}", "(na|name)*", "[^x]+é")]
    found += [GrammarSource(kind="grammar", text='root ::= "(" root ")" | "x" | ""')]
    return [source for source in found if _is_taken(backend, source)]


def _is_taken(backend: GrammarBackend, source: GrammarSource) -> bool:
    try:
        backend.compile(source)
    except GrammarError:
        return False
    return True


@pytest.mark.row(XGRAMMAR, "the wrapper's mask equals xgrammar's own bitmask at 1,000 steps over a schema set")
def test_masks_are_the_librarys_own(backend: XGrammarBackend) -> None:
    own, chance, steps = Own(), random.Random(1), 0
    taken = sources(backend)
    assert {source.kind for source in taken} == {"json_schema", "structural_tag", "regex", "grammar"}
    for source in taken:
        ours, theirs = backend.compile(source).start(), own.matcher(source)
        for _ in range(25):
            here = own.allowed(theirs)
            assert allowed(ours) == here, source
            assert ours.can_end is bool(here & ENDS)
            steps += 1
            if ours.is_complete or not here - ENDS:
                break
            token_id = chance.choice(sorted(here - ENDS))
            assert ours.accept(token_id) is None
            assert theirs.accept_token(token_id)
    assert steps > 1000


@pytest.mark.row(XGRAMMAR, "unsupported schemas say so, and what is taken goes never wrong")
@pytest.mark.row("TOOLS-GUIDANCE-OUTLINES", "the same schema suite passes with each installed one")
def test_the_campaign_finds_nothing_wrong(backend: XGrammarBackend) -> None:
    rows = schema_campaign.run(backend)
    assert sum(row.accepted for row in rows.values()) > 150
    assert sum(row.outputs for row in rows.values()) > 300
    assert [wrong for row in rows.values() for wrong in row.wrong if "was refused: json_schema" not in wrong] == []


@pytest.mark.row(XGRAMMAR, "unsupported schemas say so, inside structural tags too")
def test_what_tags_hold_is_refused_by_name(backend: XGrammarBackend) -> None:
    for asked, word in (
        (tags({"type": "string", "maxLength": 3}), "maxLength"),
        (
            {
                "type": "structural_tag",
                "structures": [{"begin": "<a>", "schema": {"not": {}}, "end": "</a>"}],
                "triggers": ["<a>"],
            },
            "not",
        ),
        ({"format": {"type": "const_string", "value": "x<tool>y"}}, "<tool>"),
    ):
        with pytest.raises(GrammarError) as refused:
            backend.compile(GrammarSource(kind="structural_tag", text=json.dumps(asked)))
        assert word in str(refused.value)


NULL = {"begin": "<f>", "schema": '{"type":"null"}', "end": "</f>"}
NUMBER = {"begin": "[", "content": {"type": "regex", "pattern": "[0-9]+"}, "end": "]"}
OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}},
    "additionalProperties": False,
}
AB = {"type": "const_string", "value": "ab"}
SAME: dict[str, tuple[dict[str, Any], list[str]]] = {
    "triggered": (tags(OBJECT), ["text <fn", '=x>{"a":1}</fn> more <', "<fn=y", '<fn=x>{"a":"']),
    "at_least_one": (
        {"format": tags(OBJECT)["format"] | {"at_least_one": True, "stop_after_first": True}},
        ["text", '<fn=x>{"b": true}</fn>', "<fn=x>{}</fn> more"],
    ),
    "older": ({"type": "structural_tag", "structures": [NULL], "triggers": ["<"]}, ["a<f>null</f>b<", "<g"]),
    "separated": (
        {"format": {"type": "tags_with_separator", "tags": [NUMBER], "separator": ","}},
        ["[1],[22],[3]", "[1]["],
    ),
    "repeat": ({"format": {"type": "repeat", "min": 2, "max": 3, "content": AB}}, ["abab", "abababa"]),
    "sequence": (
        {
            "format": {
                "type": "sequence",
                "elements": [
                    {"type": "optional", "content": AB},
                    {"type": "plus", "content": NUMBER | {"type": "tag"}},
                ],
            }
        },
        ["[1][2]", "ab[3]", "ab"],
    ),
    "or": (
        {
            "format": {
                "type": "or",
                "elements": [
                    {"type": "grammar", "grammar": 'root ::= "q" root | "r"'},
                    {"type": "grammar", "syntax": "lark", "grammar": 'start: "z"'},
                ],
            }
        },
        ["qqr", "z", "q"],
    ),
}


@pytest.mark.row(TAG, "results equal xgrammar's structural tags")
@pytest.mark.parametrize("name", SAME)
def test_tags_are_the_same_with_either_backend(backend: XGrammarBackend, other: LLGuidanceBackend, name: str) -> None:
    """At every byte of texts that fit, and of texts that do not up to where they stop fitting: equal masks, but for tokens
    that are no whole characters."""
    asked, texts = SAME[name]
    source = GrammarSource(kind="structural_tag", text=json.dumps(asked))
    for text in texts:
        one, two = backend.compile(source).start(), other.compile(source).start()
        for byte in [*text.encode(), None]:
            assert whole(allowed(one)) == whole(allowed(two))
            assert one.can_end is two.can_end
            if byte is None or byte not in allowed(one):
                break
            assert one.accept(byte) is two.accept(byte) is None


def whole(ids: set[int]) -> set[bytes]:
    found = set()
    for token_id in ids - ENDS:
        try:
            WORDS.tokens[token_id].decode()
        except UnicodeDecodeError:
            continue
        found.add(WORDS.tokens[token_id])
    return found


REGEXES = ["a+b?", "(x|yy){1,3}", r"\d{2}", r"\w+", r"[^a]", "(?:na)+", r"\.", "a{0,3}b", "[a-c]|[x-z]{2}", r"\s\S"]
ODD = ["(?=a)b", "(?!a)b", r"(a)\1", r"\bx", "(?i)ab", "a*?b", "^ab$", "(?P<n>a)(?P=n)", r"\p{L}", "a{,3}b"]


@pytest.mark.row(XGRAMMAR, "what it does not keep is refused: regular expressions mean what they mean in Python")
@pytest.mark.parametrize("regex", [*REGEXES, *ODD])
def test_regexes_are_refused_or_kept(backend: XGrammarBackend, regex: str) -> None:
    try:
        grammar = backend.compile(GrammarSource(kind="regex", text=regex))
    except GrammarError as error:
        assert regex in ODD, error
        return
    chance = random.Random(2)
    for _ in range(40):
        matcher, text = grammar.start(), b""
        for _ in range(30):
            here = sorted(allowed(matcher))
            assert here, f"nothing may follow {text!r}"
            token_id = chance.choice(here)
            if token_id in ENDS or (ENDS & set(here) and chance.random() < 0.3):
                assert re.fullmatch(regex, text.decode(errors="surrogateescape"), re.ASCII), text
                break
            assert matcher.accept(token_id) is None
            text += WORDS.tokens[token_id]
