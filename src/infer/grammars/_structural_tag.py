"""Structural tags as data: xgrammar's JSON format, and the older one with `structures` and `triggers`, read and checked.

Pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from infer.errors import GrammarError

MAX_DEPTH = 30


@dataclass(frozen=True, slots=True)
class Text:
    """Any text; none of `excludes` in it."""

    excludes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Literal:
    value: str


@dataclass(frozen=True, slots=True)
class Inner:
    """A part with a language of its own: "json_schema" (`source` is JSON), "regex", "lark" or "ebnf"."""

    language: str
    source: str


@dataclass(frozen=True, slots=True)
class Sequence:
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`part` so many times; `most` None: any number."""

    part: Part
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Tag:
    begin: str
    content: Part
    ends: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TriggeredTags:
    """Free text; where a trigger is written, one of the tags that begin with it follows."""

    triggers: tuple[str, ...]
    tags: tuple[Tag, ...]
    at_least_one: bool
    stop_after_first: bool
    excludes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SeparatedTags:
    """Tags and separators, nothing else."""

    tags: tuple[Tag, ...]
    separator: str
    at_least_one: bool
    stop_after_first: bool


Part = Text | Literal | Inner | Sequence | Choice | Repeat | Tag | TriggeredTags | SeparatedTags


def read_tags(data: Any) -> Part:
    """Raises `GrammarError` naming what is not understood."""
    if not isinstance(data, dict):
        raise _wrong("is not an object")
    if data.get("type", "structural_tag") != "structural_tag":
        raise _wrong(f"has type {data.get('type')!r}, not 'structural_tag'")
    if "structures" in data or "triggers" in data:
        return _legacy(_Fields(data, "structural_tag"))
    fields = _Fields(data, "structural_tag")
    fields.take("type", str, "structural_tag")
    part = _part(fields.take("format", dict), 0)
    fields.end()
    return part


def parts_of(part: Part) -> Iterator[Part]:
    """The part and all parts in it."""
    yield part
    inner: tuple[Part, ...] = ()
    if isinstance(part, Sequence | Choice):
        inner = part.parts
    elif isinstance(part, TriggeredTags | SeparatedTags):
        inner = part.tags
    elif isinstance(part, Repeat):
        inner = (part.part,)
    elif isinstance(part, Tag):
        inner = (part.content,)
    for one in inner:
        yield from parts_of(one)


def texts_of(part: Part) -> tuple[str, ...]:
    """What the part itself says must or may not be written."""
    match part:
        case Literal():
            return (part.value,)
        case Tag():
            return (part.begin, *part.ends)
        case TriggeredTags():
            return (*part.triggers, *part.excludes)
        case SeparatedTags():
            return (part.separator,)
        case Text():
            return part.excludes
    return ()


def modern(data: dict[str, Any]) -> dict[str, Any]:
    """What `read_tags` takes, in the newer format."""
    if "structures" not in data:
        return data
    tags = []
    for one in data["structures"]:
        schema = json.loads(one["schema"]) if isinstance(one["schema"], str) else one["schema"]
        content = {"type": "json_schema", "json_schema": schema}
        tags.append({"type": "tag", "begin": one["begin"], "content": content, "end": one["end"]})
    wanted = {"type": "triggered_tags", "triggers": data["triggers"], "tags": tags}
    return {"type": "structural_tag", "format": wanted}


def _legacy(fields: _Fields) -> Part:
    fields.take("type", str, "structural_tag")
    structures, triggers = fields.take("structures", list), fields.strings("triggers")
    fields.end()
    tags = []
    for structure in structures:
        one = _Fields(structure, "structures")
        begin, end, schema = one.take("begin", str), one.take("end", str), one.take("schema", (dict, str, bool))
        one.end()
        source = schema if isinstance(schema, str) else json.dumps(schema)
        tags.append(Tag(begin, Inner("json_schema", source), (end,)))
    return _triggered(triggers, tuple(tags), False, False, ())


class _Fields:
    """Fields of one object, each to be taken; what is left over is refused by name."""

    def __init__(self, data: Any, where: str) -> None:
        if not isinstance(data, dict):
            raise _wrong(f"{where} holds {data!r:.60}, not an object")
        self._data = dict(data)
        self._where = where

    def take(self, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        if name not in self._data:
            if default is None:
                raise _wrong(f"{self._where} has no {name!r}")
            return default
        value = self._data.pop(name)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise _wrong(f"{self._where}.{name} is {value!r:.60}")
        return value

    def strings(self, name: str, default: Any = None) -> tuple[str, ...]:
        values = self.take(name, list, default)
        if not all(isinstance(value, str) and value for value in values):
            raise _wrong(f"{self._where}.{name} is not a list of texts")
        return tuple(values)

    def harmless(self, name: str, *values: Any) -> None:
        """A field that may be there with these values alone."""
        if name in self._data and self._data.pop(name) not in values:
            raise _wrong(f"{self._where}.{name} is not supported")

    def end(self) -> None:
        if self._data:
            raise _wrong(f"{self._where}.{next(iter(self._data))} is not supported")


def _part(data: Any, depth: int) -> Part:
    if depth > MAX_DEPTH:
        raise _wrong(f"is nested more than {MAX_DEPTH} deep")
    kind = data.get("type") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in _READERS:
        raise _wrong(f"format {kind!r} is not supported; known are {', '.join(_READERS)}")
    fields = _Fields(data, kind)
    fields.take("type", str)
    part = _READERS[kind](fields, depth)
    fields.end()
    return part


def _parts(fields: _Fields, depth: int) -> tuple[Part, ...]:
    found = tuple(_part(item, depth + 1) for item in fields.take("elements", list))
    if not found:
        raise _wrong("elements is empty")
    return found


def _json_schema(fields: _Fields, depth: int) -> Part:
    schema = fields.take("json_schema", (dict, bool))
    fields.harmless("style", "json")
    fields.harmless("any_order", False)
    fields.harmless("max_whitespace_cnt", None)
    fields.harmless("excludes", [])
    return Inner("json_schema", json.dumps(schema))


def _any_text(fields: _Fields, depth: int) -> Part:
    fields.harmless("max_tokens", None)
    fields.harmless("max_chars", None)
    return Text(fields.strings("excludes", []))


def _grammar(fields: _Fields, depth: int) -> Part:
    syntax = fields.take("syntax", str, "ebnf")
    if syntax not in ("ebnf", "lark"):
        raise _wrong(f"grammar.syntax is {syntax!r}")
    return Inner(syntax, fields.take("grammar", str))


def _regex(fields: _Fields, depth: int) -> Part:
    fields.harmless("excludes", [])
    return Inner("regex", fields.take("pattern", str))


def _tag(fields: _Fields, depth: int) -> Tag:
    begin, content = fields.take("begin", str), _part(fields.take("content", dict), depth + 1)
    end = fields.take("end", (str, list))
    ends = tuple(end) if isinstance(end, list) else (end,)
    if not ends or not all(isinstance(one, str) for one in ends):
        raise _wrong("tag.end is not a text or a list of texts")
    return Tag(begin, content, ends)


def _tags(fields: _Fields, depth: int) -> tuple[Tag, ...]:
    found = []
    for item in fields.take("tags", list):
        one = _Fields(item, "tag")
        if one.take("type", str, "tag") != "tag":
            raise _wrong("tags holds something that is no tag")
        found.append(_tag(one, depth + 1))
        one.end()
    if not found:
        raise _wrong("tags is empty")
    return tuple(found)


def _triggered_tags(fields: _Fields, depth: int) -> Part:
    return _triggered(
        fields.strings("triggers"),
        _tags(fields, depth),
        fields.take("at_least_one", bool, False),
        fields.take("stop_after_first", bool, False),
        fields.strings("excludes", []),
    )


def _triggered(
    triggers: tuple[str, ...],
    tags: tuple[Tag, ...],
    at_least_one: bool,
    stop_after_first: bool,
    excludes: tuple[str, ...],
) -> Part:
    for tag in tags:
        matching = [trigger for trigger in triggers if tag.begin.startswith(trigger)]
        if len(matching) != 1:
            raise _wrong(
                f"tag {tag.begin!r} begins with {len(matching)} of the triggers {list(triggers)}; it must be exactly one"
            )
    for trigger in triggers:
        if not any(tag.begin.startswith(trigger) for tag in tags):
            raise _wrong(f"no tag begins with the trigger {trigger!r}")
    return TriggeredTags(triggers, tags, at_least_one, stop_after_first, excludes)


def _separated_tags(fields: _Fields, depth: int) -> Part:
    return SeparatedTags(
        _tags(fields, depth),
        fields.take("separator", str),
        fields.take("at_least_one", bool, False),
        fields.take("stop_after_first", bool, False),
    )


def _repeat(fields: _Fields, depth: int) -> Part:
    least, most = fields.take("min", int), fields.take("max", int)
    if least < 0 or (most != -1 and most < max(1, least)):
        raise _wrong(f"repeat from {least} to {most} times is impossible")
    return Repeat(_part(fields.take("content", dict), depth + 1), least, None if most == -1 else most)


def _content(least: int, most: int | None) -> Callable[[_Fields, int], Part]:
    return lambda fields, depth: Repeat(_part(fields.take("content", dict), depth + 1), least, most)


_READERS: dict[str, Callable[[_Fields, int], Part]] = {
    "const_string": lambda fields, depth: Literal(fields.take("value", str)),
    "json_schema": _json_schema,
    "any_text": _any_text,
    "grammar": _grammar,
    "regex": _regex,
    "sequence": lambda fields, depth: Sequence(_parts(fields, depth)),
    "or": lambda fields, depth: Choice(_parts(fields, depth)),
    "tag": _tag,
    "triggered_tags": _triggered_tags,
    "tags_with_separator": _separated_tags,
    "optional": _content(0, 1),
    "plus": _content(1, None),
    "star": _content(0, None),
    "repeat": _repeat,
}


def _wrong(problem: str) -> GrammarError:
    return GrammarError(f"structural_tag: {problem}")
