"""The grammar backend over xgrammar, an optional package, for those who name it: `structured_output.backend="xgrammar"`.

Compiled in a thread beside the event loop, matched on the worker thread; owns the library's view of one vocabulary.
"""

from __future__ import annotations

import importlib.util
import json
from typing import Any

from infer.errors import GrammarError
from infer.grammars._json_schema import check_schema, forbid_additional, subschemas
from infer.grammars._regex import ascii_classes
from infer.grammars._structural_tag import Inner, Part, modern, parts_of, read_tags, texts_of
from infer.plugins.grammar import API_VERSION, GrammarSource, GrammarSpec, Vocabulary
from infer.plugins.hookspecs import hookimpl
from infer.plugins.platform import Probe

NOT_KEPT = (
    *("not", "if", "then", "else", "oneOf", "uniqueItems", "contains", "minContains", "maxContains", "propertyNames"),
    *("dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems", "unevaluatedProperties"),
    *("$dynamicRef", "$recursiveRef", "$anchor", "$id", "multipleOf", "minProperties", "maxProperties", "format"),
    *("patternProperties", "minLength", "maxLength", "pattern", "additionalItems"),
)
"""Keywords that version 0.2.9 passes over or keeps in part: it warns, or not, and goes on with another language. A string with a
length, for one, may hold control characters, and none that must be escaped."""
ALONE = ("enum", "const", "anyOf", "$ref")
"""Keywords beside which no other restricts."""
WITH_ANY = frozenset(
    {"$defs", "definitions", "title", "description", "default", "examples", "$schema", "$comment", "deprecated"}
)
MAX_WHITESPACE = 128


def probe() -> Probe:
    """Whether the package is installed."""
    found = importlib.util.find_spec("xgrammar") is not None
    return Probe(found, "" if found else "the package xgrammar is not installed (pip install xgrammar)")


class XGrammarBackend:
    """Implements `plugins.grammar.GrammarBackend`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        import xgrammar  # noqa: PLC0415 - two seconds, and torch

        self._library = xgrammar
        self.vocabulary = vocabulary
        special = {*vocabulary.special_ids, *vocabulary.eos_token_ids}
        self._special_names = sorted({vocabulary.tokens[i].decode(errors="replace") for i in special} - {""})
        # An empty token is none; a special one is no text.
        tokens = [b"" if token_id in special else token for token_id, token in enumerate(vocabulary.tokens)]
        self._info = xgrammar.TokenizerInfo(
            tokens,
            vocab_type=xgrammar.VocabType.RAW,
            vocab_size=len(tokens),
            stop_token_ids=list(vocabulary.eos_token_ids),
        )
        self._compiler = xgrammar.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)

    def compile(self, source: GrammarSource) -> XGrammar:
        try:
            compiled = self._compile(source)
        except GrammarError:
            raise
        except Exception as error:  # the library's own errors, and those of its bindings
            raise GrammarError(f"{source.kind} cannot be used: {' '.join(str(error).split())[:500]}") from None
        return XGrammar(self._library, compiled, self.vocabulary)

    def _compile(self, source: GrammarSource) -> Any:
        compiler = self._compiler
        if source.kind == "json_schema":
            if source.whitespace_pattern is not None:
                raise GrammarError("json_schema: whitespace_pattern is not supported by xgrammar")
            schema = json.loads(source.text)
            if source.forbid_additional_properties:
                schema = forbid_additional(schema)
            check_kept(schema)
            return compiler.compile_json_schema(
                json.dumps(schema),
                any_whitespace=not source.compact,
                separators=(",", ":") if source.compact else None,
                strict_mode=False,
                max_whitespace_cnt=None if source.compact else MAX_WHITESPACE,
            )
        if source.kind == "regex":
            return compiler.compile_regex(ascii_classes(source.text))  # its \s takes a byte order mark in
        if source.kind == "choice":
            choices = dict.fromkeys(json.loads(source.text))
            return compiler.compile_grammar("root ::= " + " | ".join(json.dumps(choice) for choice in choices))
        if source.kind == "structural_tag":
            data = json.loads(source.text)
            self._check_tags(read_tags(data))
            return compiler.compile_structural_tag(modern(data))
        return compiler.compile_grammar(source.text)

    def _check_tags(self, tags: Part) -> None:
        """Schemas inside are like others; texts of special tokens would be spelled in bytes."""
        for part in parts_of(tags):
            if isinstance(part, Inner) and part.language == "json_schema":
                check_kept(json.loads(part.source))
            for text in texts_of(part):
                name = next((name for name in self._special_names if name in text), None)
                if name is not None:
                    raise GrammarError(f"structural_tag: {name!r} is a special token; xgrammar takes it for text")


class XGrammar:
    """Implements `plugins.grammar.Grammar`."""

    def __init__(self, library: Any, compiled: Any, vocabulary: Vocabulary) -> None:
        self._library = library
        self._compiled = compiled
        self._vocabulary = vocabulary

    def start(self) -> XGrammarMatcher:
        return XGrammarMatcher(self._library, self._compiled, self._vocabulary)


class XGrammarMatcher:
    """Implements `plugins.grammar.Matcher`. The library tells its end by the mask, which is made at most once per token."""

    def __init__(self, library: Any, compiled: Any, vocabulary: Vocabulary) -> None:
        self._matcher = library.GrammarMatcher(compiled)
        self._bits = library.allocate_token_bitmask(1, len(vocabulary.tokens))
        self._vocabulary = vocabulary
        self._mask: bytes | None = None

    def accept(self, token_id: int) -> str | None:
        if token_id in self._vocabulary.eos_token_ids and not self.can_end:
            return f"token {token_id} ends the answer where the grammar does not"
        self._mask = None
        if self._matcher.is_terminated() or not self._matcher.accept_token(token_id):
            return f"token {token_id} does not fit the grammar"
        return None

    def fill(self, mask: bytearray) -> None:
        mask[:] = self._current()

    @property
    def can_end(self) -> bool:
        end = self._vocabulary.eos_token_ids[0]
        return bool(self._current()[end >> 3] >> (end & 7) & 1)

    @property
    def is_complete(self) -> bool:
        if not self.can_end:
            return False
        rest = bytearray(self._current())
        for end in self._vocabulary.eos_token_ids:
            rest[end >> 3] &= ~(1 << (end & 7)) & 0xFF
        return not any(rest)

    def _current(self) -> bytes:
        if self._mask is None:
            if self._matcher.is_terminated():
                return bytes(self._vocabulary.mask_bytes)
            self._bits.fill_(-1)
            self._matcher.fill_next_token_bitmask(self._bits)
            made = bytearray(self._bits.numpy().tobytes()[: self._vocabulary.mask_bytes])
            spare = 8 * len(made) - len(self._vocabulary.tokens)
            for token_id in range(8 * len(made) - spare, 8 * len(made)):
                made[token_id >> 3] &= ~(1 << (token_id & 7)) & 0xFF
            self._mask = bytes(made)
        return self._mask


def check_kept(schema: Any) -> None:
    """Raises `GrammarError` naming what xgrammar does not keep."""
    check_schema(schema)
    for path, part in subschemas(schema):
        for word in NOT_KEPT:
            if word in part:
                raise GrammarError(f"json_schema: {path}{word} is not kept by xgrammar; llguidance keeps more")
        for word in ALONE:
            beside = sorted(part.keys() - WITH_ANY - {word}) if word in part else []
            if beside:
                raise GrammarError(f"json_schema: {path}{word} beside {beside[0]} is not kept by xgrammar")
        if not set(part.get("required") or ()) <= set(part.get("properties") or ()):
            raise GrammarError(
                f"json_schema: {path}required names what properties does not; xgrammar does not keep that"
            )
        values = [*(part.get("enum") or ()), part.get("const")]
        if any(isinstance(value, list | dict) and value for value in values):
            raise GrammarError(f"json_schema: {path}an array or object as a value is not kept by xgrammar")
        if "type" not in part and part.keys() - WITH_ANY - {*ALONE, "allOf"}:
            raise GrammarError(
                f"json_schema: {path}without a type, xgrammar takes it for another schema; state the type"
            )
        if len(part.get("allOf") or ()) > 1:
            raise GrammarError(f"json_schema: {path}allOf of several schemas is not kept by xgrammar")
        if str(part.get("$ref", "#"))[:1] != "#":
            raise GrammarError(f"json_schema: {path}$ref={part['$ref']!r} is not in the schema")


@hookimpl
def infer_grammars() -> list[GrammarSpec]:
    return [
        GrammarSpec(
            name="xgrammar",
            api=API_VERSION,
            factory="infer.grammars.xgrammar:XGrammarBackend",
            probe="infer.grammars.xgrammar:probe",
            kinds=("json_schema", "regex", "choice", "grammar", "structural_tag"),
            priority=10,
            example={
                "accepts": [
                    [
                        "json_schema",
                        '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"],"additionalProperties":false}',
                        '{"a":12}',
                    ],
                    ["regex", "[a-c]{2,4}(x|y)", "abcx"],
                    ["choice", '["red","green","blue"]', "green"],
                    ["grammar", 'root ::= "a"+ "b" | "c"', "aab"],
                ],
                "rejects": [
                    ["regex", "[a-c]{2,4}(x|y)", "ax"],
                    ["choice", '["red","green","blue"]', "white"],
                    ["grammar", 'root ::= "a"+ "b" | "c"', "ac"],
                ],
                "refused": [
                    ["json_schema", '{"not":{"type":"string"}}', "not"],
                    ["json_schema", '{"type":"array","uniqueItems":true}', "uniqueItems"],
                    ["grammar", "root ::= other", "other"],
                ],
            },
        )
    ]
