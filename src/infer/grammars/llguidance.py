"""The grammar backend over llguidance: JSON schema, regex, choices, Lark and EBNF grammars, structural tags.

Compiled in a thread beside the event loop, matched on the worker thread; owns the library's tokenizer of one vocabulary.
"""

from __future__ import annotations

import importlib.util
import json
import re
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from infer.errors import GrammarError
from infer.grammars._json_schema import check_schema, forbid_additional, real_times
from infer.grammars._regex import ascii_classes
from infer.grammars._structural_tag import read_tags
from infer.grammars._tag_grammar import to_lark
from infer.plugins.grammar import API_VERSION, GrammarSource, GrammarSpec, Vocabulary
from infer.plugins.hookspecs import hookimpl
from infer.plugins.platform import Probe

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

PADDED_SPECIAL = b"<|unused-%d|>"
_HEADER = re.compile(r"^[ \t]*%llguidance[ \t]*(\{[^\n]*\})[ \t]*$", re.MULTILINE)
_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?|\n *\d+ \| .*", re.DOTALL)
WHITESPACE = r"[ \t\n\r]{0,128}"
"""Between JSON tokens. Bounded: models that have nothing to say write white space for ever."""
MAX_LEXER_STATES = 100_000
"""Of one compiled grammar, over all outputs it guides; about a kilobyte each."""


def probe() -> Probe:
    """Whether the package is installed."""
    found = importlib.util.find_spec("llguidance") is not None
    return Probe(found, "" if found else "the package llguidance is not installed (pip install llguidance)")


class _Words:
    """What the library asks of a tokenizer."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        special = {*vocabulary.special_ids, *vocabulary.eos_token_ids}
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.bos_token_id: int | None = None
        # A special token needs a name: an empty one would match where nothing is.
        self.tokens = [
            (token or PADDED_SPECIAL % i) if i in special else token for i, token in enumerate(vocabulary.tokens)
        ]
        self.special_token_ids = sorted(special)
        self._encode = vocabulary.encode

    def __call__(self, text: str) -> list[int]:
        if isinstance(text, bytes):
            raise TypeError("text, not bytes")  # how the library finds out which of them it may give
        return self._encode(text)


class LLGuidanceBackend:
    """Implements `plugins.grammar.GrammarBackend`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        from llguidance import LLParserLimits, LLTokenizer, TokenizerWrapper  # noqa: PLC0415 - loads with the backend

        self.vocabulary = vocabulary
        self._special = special_names(vocabulary)
        self.limits: LLParserLimits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        self.tokenizer: LLTokenizer = LLTokenizer(
            TokenizerWrapper(_Words(vocabulary)),
            n_vocab=len(vocabulary.tokens),
            eos_token=list(vocabulary.eos_token_ids),
        )

    def compile(self, source: GrammarSource) -> LLGuidanceGrammar:
        """A keyword that the library does not keep, or only warns of, is refused."""
        from llguidance import LLMatcher  # noqa: PLC0415

        try:
            text = _library_grammar(source, self._special)
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"{source.kind} cannot be read: {_short(str(error))}") from None
        failed, messages = LLMatcher.validate_grammar_with_warnings(text, self.tokenizer, limits=self.limits)
        if failed or messages:
            complaint = "; ".join(messages)
            if source.kind != "grammar":  # the line it names is one that nobody wrote
                complaint = _PLACE.sub("", complaint)
            raise GrammarError(f"{source.kind} cannot be used: {_explained(complaint)}")
        grammar = LLGuidanceGrammar(
            lambda: LLMatcher(self.tokenizer, text, log_level=0, limits=self.limits), self.vocabulary
        )
        self._try(source, grammar.start())
        return grammar

    def _try(self, source: GrammarSource, matcher: LLGuidanceMatcher) -> None:
        """Take one step: limits that only show then, and grammars of nothing, are the request's fault, not the step's."""
        mask = bytearray(self.vocabulary.mask_bytes)
        try:
            matcher.fill(mask)
            for token_id in self.vocabulary.eos_token_ids:
                mask[token_id >> 3] &= ~(1 << (token_id & 7))
            place = next((place for place, byte in enumerate(mask) if byte), None)
            if place is None:
                raise GrammarError("no text but the empty one satisfies it, or none at all")
            refusal = matcher.accept(8 * place + (mask[place] & -mask[place]).bit_length() - 1)
            if refusal is not None:
                raise GrammarError(refusal)
            matcher.fill(mask)
        except GrammarError as error:
            raise GrammarError(f"{source.kind} cannot be used: {error}") from None


class LLGuidanceGrammar:
    """Implements `plugins.grammar.Grammar`: a matcher that stays at the start and is copied.

    Copies share their lexer and its states. When these have reached their limit, later outputs begin with another one.
    """

    def __init__(self, make: Callable[[], LLMatcher], vocabulary: Vocabulary) -> None:
        self._make = make
        self._matcher = make()
        self._vocabulary = vocabulary
        self._is_spent = False
        self._lock = threading.Lock()

    def start(self) -> LLGuidanceMatcher:
        with self._lock:
            if self._is_spent:
                self._matcher, self._is_spent = self._make(), False
            return LLGuidanceMatcher(self._matcher.deep_copy(), self._vocabulary, self._spend)

    def _spend(self) -> None:
        self._is_spent = True


class LLGuidanceMatcher:
    """Implements `plugins.grammar.Matcher`."""

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary, on_limit: Callable[[], None]) -> None:
        self._matcher = matcher
        self._on_limit = on_limit
        self._eos = frozenset(vocabulary.eos_token_ids)

    def accept(self, token_id: int) -> str | None:
        if token_id in self._eos and not self._matcher.is_accepting():
            return f"token {token_id} ends the answer where the grammar does not"
        if self._matcher.consume_token(token_id):
            return None
        error = self._matcher.get_error()
        if "too many" in error.lower():
            self._on_limit()
        return f"token {token_id} does not fit the grammar: {_explained(error)}"

    def fill(self, mask: bytearray) -> None:
        bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            self._on_limit()
            raise GrammarError(f"the grammar cannot be followed any further: {_explained(self._matcher.get_error())}")
        mask[: len(bits)] = bits[: len(mask)]

    @property
    def can_end(self) -> bool:
        return bool(self._matcher.is_accepting())

    @property
    def is_complete(self) -> bool:
        return bool(self._matcher.is_stopped() and self._matcher.is_accepting())


def special_names(vocabulary: Vocabulary) -> dict[str, int]:
    """Name -> id of the special tokens that have one."""
    names = {vocabulary.tokens[token_id].decode(errors="replace"): token_id for token_id in vocabulary.special_ids}
    names.pop("", None)
    return names


def _library_grammar(source: GrammarSource, special: dict[str, int]) -> str:
    """The source in the library's own format. `ValueError` says what cannot be read."""
    from llguidance import LLMatcher, regex_to_lark  # noqa: PLC0415

    inner: list[tuple[str, str, str]] = []
    if source.kind == "json_schema":
        lark = f"start: %json {json.dumps(_schema(source))}"
    elif source.kind == "regex":
        lark = f"start: /{regex_to_lark(ascii_classes(source.text), use_ascii='')}/"
    elif source.kind == "choice":
        lark = choice_lark(json.loads(source.text))
    elif source.kind == "structural_tag":
        lark, inner = to_lark(read_tags(json.loads(source.text)), special)
    else:
        lark = _lark(source.text, "ebnf")
    if not inner:
        return str(LLMatcher.grammar_from_lark(_unforced(lark)))
    parts = [{"name": "tags", "lark_grammar": _unforced(lark)}]
    parts += [{"name": name, "lark_grammar": _unforced(_lark(text, syntax))} for name, syntax, text in inner]
    return json.dumps({"grammars": parts})


def _lark(text: str, syntax: str) -> str:
    """The grammar in Lark; with "ebnf" it may be in either syntax."""
    from llguidance.gbnf_to_lark import any_to_lark  # noqa: PLC0415

    if syntax == "lark":
        return text
    try:
        return str(any_to_lark(text))
    except Exception as error:  # the converter raises whatever it trips over
        raise ValueError(str(error)) from None


def _unforced(lark: str) -> str:
    """The grammar without the library's shortcut of allowing one spelling alone where the text is certain: the model
    chooses among the tokens that spell it."""
    match = _HEADER.search(lark)
    options = json.loads(match.group(1)) if match else {}
    header = f"%llguidance {json.dumps({**options, 'no_forcing': True})}"
    return f"{lark[: match.start()]}{header}{lark[match.end() :]}" if match else f"{header}\n{lark}"


def _schema(source: GrammarSource) -> dict[str, Any]:
    """The schema with the library's options."""
    schema: Any = json.loads(source.text)
    if not isinstance(schema, dict | bool):
        raise ValueError("a schema is an object or a boolean")
    schema = {"allOf": [schema]} if isinstance(schema, bool) else schema
    check_schema(schema)
    if "x-guidance" in schema:
        raise ValueError("x-guidance is not taken from a schema; see compact and whitespace_pattern")
    schema = real_times(schema)
    if source.forbid_additional_properties:
        schema = forbid_additional(schema)
    options: dict[str, Any] = {"lenient": False, "coerce_one_of": False, "whitespace_flexible": not source.compact}
    if not source.compact:
        options["whitespace_pattern"] = source.whitespace_pattern or WHITESPACE
    return {**schema, "x-guidance": options}


def choice_lark(choices: list[str]) -> str:
    """One of several texts. A text may be empty only beside others."""
    if not any(choices):
        raise ValueError("every choice is empty")
    return "start: " + " | ".join(json.dumps(choice) for choice in dict.fromkeys(choices))


def _explained(message: str) -> str:
    if message.startswith("panic"):
        return "it is too large for llguidance"
    if "Current row has" in message or "Too many items" in message:
        return (
            f"{_short(message)} (too many ways to go on at one place, as several hundred optional properties are: make them "
            "required, or fewer)"
        )
    return _short(message)


def _short(message: str) -> str:
    """The library's complaint on one line, without the parser's state behind it."""
    text = " ".join(message.replace("<non-verbose/>", "").split())
    return text if len(text) <= 500 else f"{text[:500]}..."


@hookimpl
def infer_grammars() -> list[GrammarSpec]:
    return [
        GrammarSpec(
            name="llguidance",
            api=API_VERSION,
            factory="infer.grammars.llguidance:LLGuidanceBackend",
            probe="infer.grammars.llguidance:probe",
            kinds=("json_schema", "regex", "choice", "grammar", "structural_tag"),
            priority=20,
            example={
                "accepts": [
                    ["json_schema", '{"type":"object","properties":{"a":{"type":"integer"}}}', '{"a":12}'],
                    ["regex", "[a-c]{2,4}(x|y)", "abcx"],
                    ["choice", '["red","green","blue"]', "green"],
                    ["grammar", 'start: "a" start "b" | "c"', "aacbb"],
                    ["grammar", 'root ::= "a" root "b" | "c"', "aacbb"],
                ],
                "rejects": [
                    ["json_schema", '{"type":"object","properties":{"a":{"type":"integer"}}}', '{"a":"x"}'],
                    ["regex", "[a-c]{2,4}(x|y)", "ax"],
                    ["choice", '["red","green","blue"]', "white"],
                    ["grammar", 'start: "a" start "b" | "c"', "acbb"],
                ],
                "refused": [
                    ["json_schema", '{"not":{"type":"string"}}', "not"],
                    ["json_schema", '{"type":"object","propertyNames":{"pattern":"a"}}', "propertyNames"],
                    ["regex", "(?=a)b", "look-around"],
                    ["grammar", "start: other", "other"],
                ],
            },
        )
    ]
