"""Runs the schemas of `schema_cases` against a grammar backend, and counts: accepted, refused by name, wrong.

Used by the tests and by tools/schema_table.py; no model, on the calling thread.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

import jsonschema

from grammar_vocabularies import wide_vocabulary
from infer import GrammarError
from infer.plugins.grammar import Grammar, GrammarBackend, GrammarSource
from schema_cases import REFUSED_CASES, accepted_cases

WALKS = 4
MAX_TOKENS = 160
VOCABULARY = wide_vocabulary()


@dataclass(slots=True)
class Row:
    """What became of the schemas about one keyword."""

    schemas: int = 0
    accepted: int = 0
    refused: int = 0
    outputs: int = 0
    """Random outputs that ended by themselves."""
    documents: int = 0
    """Documents that the schemas allow, in two layouts each."""
    wrong: list[str] = field(default_factory=list)


def validator(schema: Any) -> Any:
    """An independent judge, formats included. The one old keyword that is followed is judged by its own draft."""
    old = "additionalItems" in json.dumps(schema)
    kind = jsonschema.Draft7Validator if old else jsonschema.Draft202012Validator
    return kind(schema, format_checker=kind.FORMAT_CHECKER)


def problem(schema: Any, text: str) -> str | None:
    """What is wrong with an output; None when nothing is."""
    try:
        document = json.loads(text)
        errors = [error.message for error in validator(schema).iter_errors(document)]
    except ValueError as error:
        errors = [str(error)]
    return f"{json.dumps(schema)[:200]} got {text[:200]!r}: {errors[0]}" if errors else None


def run(backend: GrammarBackend, seed: int = 0) -> dict[str, Row]:
    """Keyword -> its row; keywords in the order of the cases, those that are always refused last."""
    rows: dict[str, Row] = {}
    generator = random.Random(seed)
    for word, schema, documents in accepted_cases():
        row = rows.setdefault(word, Row())
        row.schemas += 1
        try:
            grammar = backend.compile(GrammarSource(kind="json_schema", text=json.dumps(schema)))
        except GrammarError as error:
            row.refused += 1
            row.wrong.append(f"{json.dumps(schema)[:200]} was refused: {error}")
            continue
        row.accepted += 1
        _walk(row, grammar, schema, generator)
        _feed(row, grammar, schema, documents)
    for word, schema in REFUSED_CASES:
        row = rows.setdefault(word, Row())
        row.schemas += 1
        try:
            backend.compile(GrammarSource(kind="json_schema", text=json.dumps(schema)))
        except GrammarError:
            row.refused += 1
        else:
            row.wrong.append(f"{json.dumps(schema)[:200]} was accepted")
    return rows


def _walk(row: Row, grammar: Grammar, schema: Any, generator: random.Random) -> None:
    """Outputs of a model that knows nothing: any allowed token, the end a little more often."""
    ends = set(VOCABULARY.eos_token_ids)
    for _ in range(WALKS):
        matcher, text = grammar.start(), b""
        for _ in range(MAX_TOKENS):
            allowed = allowed_ids(matcher)
            if not allowed:
                row.wrong.append(f"{json.dumps(schema)[:200]}: nothing may follow {text!r}")
                break
            token_id = generator.choice(allowed)
            if token_id in ends or (ends & set(allowed) and generator.random() < 0.2) or matcher.is_complete:
                row.outputs += 1
                found = problem(schema, text.decode(errors="replace"))
                row.wrong += [found] if found else []
                break
            matcher.accept(token_id)
            text += VOCABULARY.tokens[token_id]


def _feed(row: Row, grammar: Grammar, schema: Any, documents: list[Any]) -> None:
    for document in documents:
        for indent in (None, 2):
            row.documents += 1
            text = json.dumps(document, ensure_ascii=False, indent=indent)
            matcher = grammar.start()
            fits = all(byte in allowed_ids(matcher) and matcher.accept(byte) is None for byte in text.encode())
            if not (fits and matcher.can_end):
                row.wrong.append(f"{json.dumps(schema)[:200]} did not allow {text[:200]!r}")


def allowed_ids(matcher: Any) -> list[int]:
    mask = bytearray(VOCABULARY.mask_bytes)
    matcher.fill(mask)
    return [i for i in range(len(VOCABULARY.tokens)) if mask[i >> 3] >> (i & 7) & 1]


def table(rows: dict[str, Row]) -> str:
    """The rows as Markdown, with their sum."""
    head = "| keyword | schemas | accepted | refused by name | outputs | documents | wrong |"
    lines = [head, "|---|" + "---:|" * 6]
    total = Row()
    for word, row in rows.items():
        lines.append(_line(f"`{word}`" if word.isidentifier() or word[0] == "$" else word, row))
        for name in ("schemas", "accepted", "refused", "outputs", "documents"):
            setattr(total, name, getattr(total, name) + getattr(row, name))
        total.wrong += row.wrong
    return "\n".join([*lines, _line("**all**", total)]) + "\n"


def _line(word: str, row: Row) -> str:
    counts = (row.schemas, row.accepted, row.refused, row.outputs, row.documents, len(row.wrong))
    return f"| {word} | " + " | ".join(map(str, counts)) + " |"
