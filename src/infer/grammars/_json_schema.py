"""What is looked at in a JSON schema before a library compiles it: its size, and words that a library passes over.

Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from infer.errors import GrammarError
from infer.grammars._endless import endless

MAX_DEPTH = 100
MAX_PROPERTIES = 6_000
"""Named properties in the whole schema. Compiling takes a second for so many, and grows with their square."""
MAX_MULTIPLE = 10_000
"""Largest `multipleOf`: the automaton has as many states."""
OLD_WORDS = {
    "divisibleBy": "multipleOf",
    "disallow": "other types",
    "extends": "allOf",
    "nullable": '"type": [..., "null"]',
}
"""Words that restrict or widen in an older draft or in OpenAPI, and mean nothing now -> what to write."""
_YEAR = "([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
TIMES = {
    "date": f"^{_YEAR}-",
    "time": "^[0-9]{2}:[0-9]{2}:[0-5]",
    "date-time": f"^{_YEAR}-[0-9]{{2}}-[0-9]{{2}}[Tt ][0-9]{{2}}:[0-9]{{2}}:[0-5]",
}
"""Format -> how its texts begin. RFC 3339 also has a year 0, and a second 60 at few moments; few programs read them."""
SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
SINGLE = ("items", "additionalItems", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")


def check_schema(schema: Any) -> None:
    """Raises `GrammarError` naming the keyword."""
    num_properties = 0
    parts = list(subschemas(schema))
    for path, part in parts:
        for word, instead in OLD_WORDS.items():
            if part.get(word) not in (None, False):
                raise GrammarError(
                    f"json_schema: {path}{word} is not a keyword of JSON Schema 2020-12; write {instead}"
                )
        multiple = part.get("multipleOf")
        if isinstance(multiple, int | float) and not isinstance(multiple, bool) and multiple > MAX_MULTIPLE:
            raise GrammarError(
                f"json_schema: {path}multipleOf={multiple} is too large to follow digit by digit; it can be at most "
                f"{MAX_MULTIPLE}"
            )
        properties = part.get("properties")
        num_properties += len(properties) if isinstance(properties, dict) else 0
        _check_min_properties(path, part)
    if num_properties > MAX_PROPERTIES:
        raise GrammarError(f"json_schema: it has {num_properties} properties; at most {MAX_PROPERTIES} can be followed")
    place = endless(schema, parts)
    if place is not None:
        where = place.rstrip(".") or "the whole"
        raise GrammarError(f"json_schema: no value of {where[:200]} ever ends: its references lead back to it")


def _check_min_properties(path: str, part: dict[str, Any]) -> None:
    """A key of an open object may come twice, and counts once: only named properties can be counted."""
    least = part.get("minProperties")
    if not isinstance(least, int) or least < 2 or least <= len(part.get("required") or ()):
        return
    if part.get("additionalProperties") is not False or part.get("patternProperties"):
        raise GrammarError(
            f"json_schema: {path}minProperties={least} cannot be kept where properties may have any name; list properties "
            "and set additionalProperties to false, or make as many required"
        )


def forbid_additional(schema: Any) -> Any:
    """The same schema, where objects that list properties and do not say otherwise have no others."""

    def close(part: dict[str, Any]) -> dict[str, Any]:
        if "properties" in part and not part.keys() & {"additionalProperties", "patternProperties"}:
            return {**part, "additionalProperties": False}
        return part

    return rewritten(schema, close)


def real_times(schema: Any) -> Any:
    """The same schema, where dates have a year that exists and times no leap second: what calendars can read."""

    def tighten(part: dict[str, Any]) -> dict[str, Any]:
        name = part.get("format")
        pattern = TIMES.get(name) if isinstance(name, str) else None
        if pattern is None:
            return part
        return {**part, "allOf": [*(part.get("allOf") or ()), {"pattern": pattern}]}

    return rewritten(schema, tighten)


def rewritten(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """A copy with `change` applied to every schema object in it, the innermost first. Depth was checked before."""
    if isinstance(schema, list):
        return [rewritten(part, change) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in SCHEMAS and isinstance(value, dict):
            made[key] = {name: rewritten(part, change) for name, part in value.items()}
        elif key in LISTS or key in SINGLE:
            made[key] = rewritten(value, change)
        else:
            made[key] = value
    return change(made)


def subschemas(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """(path that ends with a dot or is empty, schema object), the whole first. Raises `GrammarError` when it is too deep."""
    stack: list[tuple[str, Any, int]] = [("", schema, 0)]
    while stack:
        path, part, depth = stack.pop()
        if not isinstance(part, dict):
            continue
        if depth > MAX_DEPTH:
            raise GrammarError(f"json_schema: it is nested more than {MAX_DEPTH} deep; use $ref")
        yield path, part
        for key, value in part.items():
            if key in SCHEMAS and isinstance(value, dict):
                stack += [(f"{path}{key}.{name}.", inner, depth + 1) for name, inner in value.items()]
            elif key in LISTS and isinstance(value, list):
                stack += [(f"{path}{key}.{i}.", inner, depth + 1) for i, inner in enumerate(value)]
            elif key in SINGLE:
                stack.append((f"{path}{key}.", value, depth + 1))
