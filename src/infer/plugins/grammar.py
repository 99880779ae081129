"""Contract of a grammar backend (hook `infer_grammars`): from a grammar to the tokens that may come next. No tensors.

`compile` runs in a thread beside the event loop; matchers run on the worker thread and the one that fills masks ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec

API_VERSION = 1

GrammarKind = Literal["json_schema", "regex", "choice", "grammar", "structural_tag"]


class GrammarSource(msgspec.Struct, frozen=True, kw_only=True):
    """A grammar as it was asked for. Equal sources compile to the same grammar: it is the key of the cache."""

    kind: GrammarKind
    text: str
    """json_schema and structural_tag: JSON. choice: a JSON list of strings. regex: the expression. grammar: Lark or EBNF."""
    compact: bool = False
    """JSON without white space."""
    whitespace_pattern: str | None = None
    """Regex of the white space between JSON tokens; None: any, up to a bound that leaves room for indentation."""
    forbid_additional_properties: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The tokens as a grammar sees them."""

    tokens: Sequence[bytes]
    """By id, as many as the model has logits: the bytes an id adds to the text, b"" where it adds none. A special token's are
    those of its name."""
    special_ids: frozenset[int]
    """Ids that are no ordinary text: a grammar allows one only where it names it."""
    eos_token_ids: tuple[int, ...]
    """Ids that end an answer, of which at least one is there."""
    encode: Callable[[str], list[int]]
    """The ids of a text, no special tokens added; for what a grammar forces."""

    @property
    def mask_bytes(self) -> int:
        """Size of a mask: a bit per id, in whole 32-bit words."""
        return -(-len(self.tokens) // 32) * 4


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSpec:
    """A grammar backend by name. The engine takes the available one of highest priority unless the config names one."""

    name: str
    api: int
    factory: str
    """"module:attr", called as `factory(vocabulary: Vocabulary) -> GrammarBackend`; may take a second."""
    probe: str
    """"module:attr", called with nothing, returns `infer.plugins.Probe`: whether the package it needs is there."""
    kinds: tuple[str, ...]
    """The `GrammarKind`s that it compiles."""
    priority: int = 0
    example: dict[str, Any]
    """{"accepts": [[kind, text, document], ...], "rejects": [...], "refused": [[kind, text, word of the message], ...]}."""


class GrammarBackend(Protocol):
    """Compiles grammars for one vocabulary. Thread-safe."""

    def compile(self, source: GrammarSource) -> Grammar:
        """Raises `GrammarError` naming what it cannot do: a keyword that would have no effect is never let through.

        Bounded in memory and, as far as it can, in time; the caller stops waiting after its own limit.
        """
        ...


class Grammar(Protocol):
    """A compiled grammar. Never changes; thread-safe."""

    def start(self) -> Matcher:
        """A matcher before the first token."""
        ...


class Matcher(Protocol):
    """Where one output stands in its grammar. One thread at a time."""

    def accept(self, token_id: int) -> str | None:
        """Take a token in. Why it cannot be, or None; after a refusal the matcher is not used any more."""
        ...

    def fill(self, mask: bytearray) -> None:
        """Write `Vocabulary.mask_bytes` bytes: bit i % 8 of byte i // 8 is 1 where token i may come next. The bits of
        `eos_token_ids` are 1 exactly where the output may end. Raises `GrammarError` when a limit is hit."""
        ...

    @property
    def can_end(self) -> bool:
        """The output so far is a whole sentence."""
        ...

    @property
    def is_complete(self) -> bool:
        """It is one, and nothing may follow."""
        ...
