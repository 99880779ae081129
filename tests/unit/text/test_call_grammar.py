"""Grammars of calls, for every format that has one: what the format writes is allowed, and nothing that breaks a schema."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from grammar_vocabularies import wide_vocabulary
from infer.config.engine import PluginsSection
from infer.plugins import CallSyntax, Vocabulary, build_registry
from infer.plugins.grammar import GrammarBackend, GrammarSource
from infer.testing.kits.parser import write_calls
from infer.text.call_grammar import Tag, call_or_form, may_call, must_call, syntax_of

REGISTRY = build_registry(PluginsSection())
SYNTAXES = [
    (f"{spec.name}-{number}", syntax)
    for spec in REGISTRY.specs("parser")
    for number, syntax in enumerate(spec.call_syntaxes)
]
MARKS = ("[TOOL_CALLS]", "[ARGS]", "<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>", "<|tool_call|>")
"""Special tokens here, as in the models that have them: a grammar must name them to allow them."""
TOOLS = {
    "add": {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    },
    "go": {"type": "object", "properties": {}, "additionalProperties": False},
}
ADD, GO, WRONG, STRANGER = ("add", '{"a": 3}'), ("go", "{}"), ("add", '{"a": "3"}'), ("fly", "{}")


def vocabulary() -> Vocabulary:
    """Bytes and pieces, and the marks as special tokens."""
    wide = wide_vocabulary()
    first = len(wide.tokens)
    tokens = [*wide.tokens, *(mark.encode() for mark in MARKS)]
    special = wide.special_ids | set(range(first, len(tokens)))
    return Vocabulary(tokens=tokens, special_ids=special, eos_token_ids=wide.eos_token_ids, encode=wide.encode)


@pytest.fixture(scope="module")
def backend() -> GrammarBackend:
    made: GrammarBackend = REGISTRY.create("grammar", "llguidance", vocabulary())
    return made


def ids(text: str) -> Iterator[int]:
    first = len(wide_vocabulary().tokens)
    while text:
        mark = next((mark for mark in MARKS if text.startswith(mark)), None)
        if mark is None:
            yield from text[0].encode()
            text = text[1:]
        else:
            yield first + MARKS.index(mark)
            text = text[len(mark) :]


def holds(backend: GrammarBackend, tag: Tag, text: str) -> bool:
    matcher = backend.compile(GrammarSource(kind="structural_tag", text=json.dumps(tag))).start()
    return all(matcher.accept(token_id) is None for token_id in ids(text)) and matcher.can_end


each = pytest.mark.parametrize("syntax", [syntax for _, syntax in SYNTAXES], ids=[name for name, _ in SYNTAXES])
marked = pytest.mark.parametrize(
    "syntax",
    [syntax for _, syntax in SYNTAXES if syntax.trigger],
    ids=[name for name, syntax in SYNTAXES if syntax.trigger],
)
CORE = "TOOLS-CALLING-CORE"


@pytest.mark.row(CORE, "required choice: a call, in every format that a grammar can write")
@each
def test_calls_that_must_be_made(backend: GrammarBackend, syntax: CallSyntax) -> None:
    several, one = must_call(syntax, TOOLS, several=True), must_call(syntax, TOOLS, several=False)
    for tag in (several, one):
        assert holds(backend, tag, write_calls(syntax, [ADD]))
        assert not holds(backend, tag, write_calls(syntax, [WRONG]))
        assert not holds(backend, tag, write_calls(syntax, [STRANGER]))
        assert not holds(backend, tag, "No.")
        assert not holds(backend, tag, "")
    assert holds(backend, several, write_calls(syntax, [ADD, GO, ADD]))
    assert not holds(backend, one, write_calls(syntax, [ADD, GO]))
    assert not holds(backend, several, write_calls(syntax, [ADD, WRONG]))


@pytest.mark.row(CORE, "strict tools: free text, and calls that fit")
@marked
def test_calls_that_may_be_made(backend: GrammarBackend, syntax: CallSyntax) -> None:
    tag = may_call(syntax, TOOLS, several=True)
    assert holds(backend, tag, "Only <b>text</b> [x] {1}.")
    for before in ("", "I look. "):
        assert holds(backend, tag, before + write_calls(syntax, [ADD]))
        assert not holds(backend, tag, before + write_calls(syntax, [WRONG]))
        assert not holds(backend, tag, before + write_calls(syntax, [STRANGER]))
    assert holds(backend, tag, write_calls(syntax, [ADD, GO]))
    assert not holds(backend, tag, write_calls(syntax, [ADD, WRONG]))
    assert not holds(backend, may_call(syntax, TOOLS, several=False), write_calls(syntax, [ADD, GO]))
    for other in syntax.excludes:
        assert not holds(backend, tag, f"see {other} there")


@marked
def test_calls_or_an_answer_of_a_form(backend: GrammarBackend, syntax: CallSyntax) -> None:
    tag = call_or_form(syntax, TOOLS, several=True, form={"type": "object", "required": ["ok"]})
    assert holds(backend, tag, write_calls(syntax, [ADD, GO]))
    assert holds(backend, tag, '{"ok": 1}')
    assert not holds(backend, tag, "text")
    assert not holds(backend, tag, write_calls(syntax, [WRONG]))


def test_the_syntax_fits_the_template() -> None:
    mistral = REGISTRY.get("parser", "mistral")
    old, new = syntax_of(mistral, "[TOOL_CALLS]"), syntax_of(mistral, "[TOOL_CALLS] [ARGS]")
    assert old is not None and new is not None
    assert write_calls(old, [GO]) == '[TOOL_CALLS] [{"name": "go", "arguments": {}}]'
    assert write_calls(new, [GO, GO]) == "[TOOL_CALLS]go[ARGS]{}" * 2
    assert syntax_of(REGISTRY.get("parser", "qwen3_coder"), "") is None
