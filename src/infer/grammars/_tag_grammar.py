"""Structural tags as a Lark grammar of llguidance. Pure; `_structural_tag` reads them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from infer.grammars._json_schema import check_schema, real_times
from infer.grammars._regex import ascii_classes
from infer.grammars._structural_tag import (
    Choice,
    Inner,
    Literal,
    Part,
    Repeat,
    SeparatedTags,
    Sequence,
    Tag,
    Text,
    TriggeredTags,
)

ANY = "/(.|\\n)*/"


def to_lark(part: Part, special: Mapping[str, int]) -> tuple[str, list[tuple[str, str, str]]]:
    """(the Lark grammar, [(name, "lark" or "ebnf", source)] of the grammars that it refers to as `@name`).

    `special`: names of special tokens; text that holds one stands for that token, which no other text can write.
    """
    writer = _Writer(special)
    start = writer.expression(part)
    return "\n".join(["%llguidance {}", f"start: {start}", *writer.rules]) + "\n", writer.grammars


class _Writer:
    """Collects rules; each method returns an expression."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self.rules: list[str] = []
        self.grammars: list[tuple[str, str, str]] = []
        self._special = special
        names = sorted(special, key=len, reverse=True)
        self._names = re.compile("|".join(re.escape(name) for name in names)) if names else None
        self._count = 0

    def expression(self, part: Part) -> str:
        if isinstance(part, Text):
            return self._text(part.excludes)
        if isinstance(part, Literal):
            return self._literal(part.value)
        if isinstance(part, Inner):
            return self._inner(part)
        if isinstance(part, Sequence):
            return self._rule(" ".join(self.expression(one) for one in part.parts))
        if isinstance(part, Choice):
            return self._rule(" | ".join(self.expression(one) for one in part.parts))
        if isinstance(part, Repeat):
            inner = self._rule(self.expression(part.part))
            return f"{inner}{{{part.least},{'' if part.most is None else part.most}}}"
        if isinstance(part, Tag):
            return self._rule(f"{self._literal(part.begin)} {self._until(part)}")
        return self._separated(part) if isinstance(part, SeparatedTags) else self._triggered(part)

    def _triggered(self, part: TriggeredTags) -> str:
        """Each tag behind the text before it: `TEXT trigger` is one lazy lexeme, so the trigger cannot be passed over."""
        bare = [self.expression(tag) for tag in part.tags]
        behind = []
        for trigger in part.triggers:
            rests = [
                f"{self._literal(tag.begin[len(trigger) :])} {self._until(tag)}"
                for tag in part.tags
                if tag.begin.startswith(trigger)
            ]
            rest = self._rule(" | ".join(rests))
            behind.append(f"{self._up_to((trigger,), part.excludes)} {rest}")
        tag = self._rule(" | ".join(behind))
        text = self._text((*part.excludes,))
        if part.at_least_one:
            first = self._rule(" | ".join(bare))
            return first if part.stop_after_first else self._rule(f"{first} {tag}* {text}")
        return self._rule(f"{tag} | {text}") if part.stop_after_first else self._rule(f"{tag}* {text}")

    def _separated(self, part: SeparatedTags) -> str:
        tag = self._rule(" | ".join(self.expression(one) for one in part.tags))
        many = tag if part.stop_after_first else self._rule(f"{tag} ({self._literal(part.separator)} {tag})*")
        return many if part.at_least_one else f"{many}?"

    def _until(self, tag: Tag) -> str:
        """Content and end. Free text runs up to the first end."""
        if isinstance(tag.content, Text) and any(tag.ends):
            return self._up_to(tuple(end for end in tag.ends if end), tag.content.excludes)
        ends = " | ".join(self._literal(end) for end in tag.ends)
        return f"{self.expression(tag.content)} ({ends})"

    def _up_to(self, marks: tuple[str, ...], excludes: tuple[str, ...]) -> str:
        """Text that ends with the first of the marks."""
        ways = []
        for mark in marks:
            match = self._names.search(mark) if self._names else None
            if match and match.start() == 0:  # a token that no text holds: nothing lazy about it
                ways.append(f"{self._text(excludes)} {self._literal(mark)}")
            else:
                name = self._name()
                self.rules.append(f"{name}[lazy]: {self._text(excludes)} {json.dumps(mark)}")
                ways.append(name)
        return self._rule(" | ".join(ways)) if len(ways) > 1 else ways[0]

    def _text(self, excludes: tuple[str, ...]) -> str:
        name = self._name().upper()
        without = "".join(f" & ~/(.|\\n)*{_regex_literal(text)}(.|\\n)*/" for text in excludes)
        self.rules.append(f"{name}: {ANY}{without}")
        return name

    def _literal(self, text: str) -> str:
        if not text:
            return '""'
        if self._names is None:
            return json.dumps(text)
        pieces, position = [], 0
        for match in self._names.finditer(text):
            if match.start() > position:
                pieces.append(json.dumps(text[position : match.start()]))
            pieces.append(f"<[{self._special[match.group()]}]>")
            position = match.end()
        if position < len(text):
            pieces.append(json.dumps(text[position:]))
        return " ".join(pieces)

    def _inner(self, part: Inner) -> str:
        if part.language == "json_schema":
            schema: Any = json.loads(part.source)
            check_schema(schema)
            schema = real_times(schema)
            return self._rule("%json " + json.dumps(schema if isinstance(schema, dict) else {"allOf": [schema]}))
        if part.language == "regex":
            from llguidance import regex_to_lark  # noqa: PLC0415 - loads with the backend

            name = self._name().upper()
            self.rules.append(f"{name}: /{regex_to_lark(ascii_classes(part.source), use_ascii='')}/")
            return name
        name = f"grammar_{len(self.grammars)}"
        self.grammars.append((name, part.language, part.source))
        return f"@{name}"

    def _rule(self, body: str) -> str:
        name = self._name()
        self.rules.append(f"{name}: {body}")
        return name

    def _name(self) -> str:
        self._count += 1
        return f"r{self._count}"


def _regex_literal(text: str) -> str:
    # Not more than needed: in these regexes an escaped "<" is the beginning of a word.
    return re.sub(r"([\\.+*?()|\[\]{}^$#&\-~/])", r"\\\1", text).replace("\n", "\\n")
