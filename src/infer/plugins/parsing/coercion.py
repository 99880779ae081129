"""Argument values that a format writes as plain text, to JSON of the types that the tool's schema declares.

Pure functions of a request's tools; run in the request's task.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

ANY = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})
STRING = frozenset({"string"})
MAX_REFERENCES = 16
_ALIASES = {
    "str": "string",
    "text": "string",
    "int": "integer",
    "float": "number",
    "double": "number",
    "bool": "boolean",
    "dict": "object",
    "list": "array",
    "tuple": "array",
    "none": "null",
}


class ToolSchemas:
    """What the request's tools say about argument types. `tools` are objects of the chat or the responses API."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._parameters: dict[str, Mapping[str, Any]] = {}
        for tool in tools:
            function = tool.get("function", tool) if isinstance(tool, Mapping) else None
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                schema = function.get("parameters")
                self._parameters[function["name"]] = schema if isinstance(schema, Mapping) else {}

    def names(self) -> frozenset[str]:
        return frozenset(self._parameters)

    def types(self, tool: str, argument: str) -> frozenset[str] | None:
        """JSON types that the argument may have; None when the schema does not say."""
        root = self._parameters.get(tool, {})
        properties = root.get("properties")
        schema = properties.get(argument) if isinstance(properties, Mapping) else None
        return None if schema is None else _types(schema, root, MAX_REFERENCES)


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str] | None:
    if not isinstance(schema, Mapping) or depth == 0:
        return None
    declared = schema.get("type")
    if isinstance(declared, str | list):
        words = [declared] if isinstance(declared, str) else [word for word in declared if isinstance(word, str)]
        return frozenset(_ALIASES.get(word.lower(), word) for word in words) & ANY or None
    if isinstance(schema.get("$ref"), str):
        return _types(_resolve(schema["$ref"], root), root, depth - 1)
    for word in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(word), list):
            branches = [_types(branch, root, depth - 1) for branch in schema[word]]
            known = [branch for branch in branches if branch is not None]
            if word == "allOf":
                return frozenset.intersection(*known) or None if known else None
            return frozenset().union(*known) if known and len(known) == len(branches) else None
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    return frozenset(map(_type_of, values)) or None


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    node: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        node = node.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(node, Mapping) else None
    return node


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    for kind, name in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "object"


def coerce(text: str, types: frozenset[str] | None) -> str:
    """The JSON text of a value of one of `types`. What fits none stays the string it was; so does what types that allow
    strings do not read otherwise. Without types the text is read as JSON where it is JSON."""
    if types == STRING:
        return quote(text)
    stripped = text.strip()
    for kind in ("null", "boolean", "integer", "number", "object", "array"):
        if types is None or kind in types:
            made = _READERS[kind](stripped, types is not None)
            if made is not None:
                return made
    return quote(text)


def quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _null(text: str, declared: bool) -> str | None:
    return "null" if text == "null" or (declared and text in ("None", "nil", "NULL")) else None


def _boolean(text: str, declared: bool) -> str | None:
    word = text.lower() if declared else text
    return word if word in ("true", "false") else None


def _integer(text: str, declared: bool) -> str | None:
    value = _parsed(text)
    if type(value) is int:
        return text
    if declared and type(value) is float and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    return None


def _number(text: str, declared: bool) -> str | None:
    value = _parsed(text)
    return text if type(value) in (int, float) and math.isfinite(value) else None


def _object(text: str, declared: bool) -> str | None:
    return _container(text, dict, declared)


def _array(text: str, declared: bool) -> str | None:
    return _container(text, list, declared)


def _container(text: str, kind: type, declared: bool) -> str | None:
    if not text.startswith(("{", "[", "(")):
        return None
    value = _parsed(text)
    if isinstance(value, kind):
        return text
    if not declared:
        return None
    try:  # models also write Python's literals
        literal = ast.literal_eval(text)
        literal = list(literal) if isinstance(literal, tuple) else literal
        made = json.dumps(literal, ensure_ascii=False, allow_nan=False) if isinstance(literal, kind) else None
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return made


def _refuse_constant(word: str) -> Any:
    raise ValueError(word)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None


_READERS = {
    "null": _null,
    "boolean": _boolean,
    "integer": _integer,
    "number": _number,
    "object": _object,
    "array": _array,
}
