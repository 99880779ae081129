"""JSON schemas for the constrained-output campaign: every keyword, alone and together, with documents that fit.

Each case is (keyword it is about, schema, documents that the schema allows in its own property order). Written here; pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

Case = tuple[str, Any, list[Any]]


def closed(properties: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required or properties),
        "additionalProperties": False,
        **more,
    }


INTEGER, STRING, BOOLEAN = {"type": "integer"}, {"type": "string"}, {"type": "boolean"}
SHORT = {"type": "string", "maxLength": 6}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}


def _types() -> Iterator[Case]:
    samples: dict[str, list[Any]] = {
        "integer": [0, -7, 123456789],
        "number": [0, -1.5, 2e10],
        "string": ["", "a b", 'say "hi"\n', "日本 é 😀"],
        "boolean": [True, False],
        "null": [None],
        "array": [[], [1, "a", None], [[]]],
        "object": [{}, {"a": {"b": [1]}}],
    }
    for name, documents in samples.items():
        yield "type", {"type": name}, documents
    for first, second in itertools.combinations(samples, 2):
        yield "type", {"type": [first, second]}, [samples[first][0], samples[second][0]]
    yield "type", {}, [1, "a", None, [], {}]
    yield "type", True, [1, {"a": 2}]


def _numbers() -> Iterator[Case]:
    for low, high in ((0, 0), (0, 9), (-5, 5), (10, 1000), (-1000, -10), (7, 7), (99, 101), (0, 2**31)):
        yield "minimum/maximum", {"type": "integer", "minimum": low, "maximum": high}, [low, high]
    for low, high in ((0, 1), (-0.5, 0.25), (1.5, 1.75), (-10, 10), (0.001, 0.01), (100, 1e4)):
        yield "minimum/maximum", {"type": "number", "minimum": low, "maximum": high}, [low, high]
    for low, high in ((0, 3), (-2, 2), (9, 12)):
        schema = {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": high}
        yield "exclusiveMinimum/exclusiveMaximum", schema, [low + 1, high - 1]
        schema = {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}
        yield "exclusiveMinimum/exclusiveMaximum", schema, [low + 0.5, high - 0.25]
    yield "minimum/maximum", {"type": "integer", "minimum": 5}, [5, 50, 500]
    yield "minimum/maximum", {"type": "integer", "maximum": -5}, [-5, -50]
    yield "minimum/maximum", {"minimum": 3}, [3, "a", None]
    for multiple in (2, 3, 5, 7, 10, 25, 64, 100, 365, 1000):
        schema = {"type": "integer", "multipleOf": multiple}
        yield "multipleOf", schema, [0, multiple, -3 * multiple, 17 * multiple]
    for multiple, documents in ((0.5, [0.5, 2, -1.5]), (0.25, [0.75, 1]), (0.125, [0.375, 2.125])):
        yield "multipleOf", {"type": "number", "multipleOf": multiple}, documents
    yield "multipleOf", {"type": "integer", "multipleOf": 6, "minimum": 10, "maximum": 50}, [12, 48]


def _strings() -> Iterator[Case]:
    for low, high in ((0, 0), (0, 3), (1, 1), (2, 5), (4, 40)):
        schema = {"type": "string", "minLength": low, "maxLength": high}
        yield "minLength/maxLength", schema, ["x" * low, "é" * high]
    yield "minLength/maxLength", {"type": "string", "minLength": 3}, ["abc", "日本語です"]
    patterns: dict[str, list[str]] = {
        "^[a-z]+$": ["abc"],
        "^[A-Z]{2}-[0-9]{3}$": ["AB-123"],
        r"^\d{4}$": ["2024"],
        r"^\w+$": ["a_b9"],
        "^(red|green|blue)$": ["red", "blue"],
        "ab": ["ab", "xxabxx"],
        "^a": ["a", "abc"],
        "z$": ["z", "xyz"],
        "^[^x]*$": ["", "abc"],
        "^x?y*z+$": ["z", "xyyzz"],
        r"^\+?[0-9 ]{5,9}$": ["+123 456"],
        "^$": [""],
        r"^[\"\\]$": ['"', "\\"],
        "^é+$": ["éé"],
        r"^(a|b)*(c|d){2}$": ["abcd", "cc"],
    }
    for pattern, documents in patterns.items():
        yield "pattern", {"type": "string", "pattern": pattern}, documents
    yield "pattern", {"type": "string", "pattern": "^[ab]*$", "minLength": 2, "maxLength": 4}, ["ab", "abab"]
    formats: dict[str, list[str]] = {
        "date": ["2024-02-28"],
        "time": ["12:30:00Z"],
        "date-time": ["2024-02-28T12:30:00Z"],
        "duration": ["P3DT4H"],
        "email": ["a@b.example"],
        "hostname": ["host.example"],
        "ipv4": ["127.0.0.1"],
        "ipv6": ["::1"],
        "uuid": ["123e4567-e89b-12d3-a456-426614174000"],
        "uri": ["https://a.example/b"],
    }
    yield "format", {"type": ["string", "null"], "format": "date"}, ["2024-02-28", None]
    yield "format", {"type": "string", "format": "date", "pattern": "^2024"}, ["2024-02-28"]
    for name, documents in formats.items():
        yield "format", {"type": "string", "format": name}, documents


def _fixed() -> Iterator[Case]:
    values: list[Any] = [0, -1.5, "", "a b", 'q"\\\n', "é日😀", True, None, [], [1, [2]], {}, {"a": 1, "b": [True]}]
    for value in values:
        yield "const", {"const": value}, [value]
    yield "enum", {"enum": values}, values
    for count in (1, 2, 3, 10, 100):
        options = [f"option {i}" for i in range(count)]
        yield "enum", {"enum": options}, [options[0], options[-1]]
    yield "enum", {"type": "integer", "enum": [1, 22, 333]}, [1, 333]
    yield "enum", {"enum": [1, 7, "x"], "minimum": 5}, [7, "x"]


def _arrays() -> Iterator[Case]:
    for low, high in ((0, 0), (0, 2), (1, 1), (2, 4), (3, 3)):
        schema = {"type": "array", "items": DIGIT, "minItems": low, "maxItems": high}
        yield "minItems/maxItems", schema, [[1] * low, [2] * high]
    yield "items", {"type": "array", "items": INTEGER}, [[], [1, 2, 3]]
    yield "items", {"type": "array", "items": {"type": "array", "items": BOOLEAN}}, [[], [[], [True]]]
    yield "items", {"type": "array", "items": False}, [[]]
    yield "items", {"items": INTEGER}, [[1], "not an array"]
    yield "prefixItems", {"type": "array", "prefixItems": [INTEGER, STRING]}, [[], [1], [1, "a"], [1, "a", None]]
    schema = {"type": "array", "prefixItems": [INTEGER, STRING], "items": False}
    yield "prefixItems", schema, [[], [1, "a"]]
    schema = {"type": "array", "prefixItems": [DIGIT, BOOLEAN], "items": {"type": "null"}, "minItems": 2, "maxItems": 4}
    yield "prefixItems", schema, [[1, True], [1, False, None, None]]
    yield "additionalItems", {"type": "array", "items": [INTEGER, STRING], "additionalItems": False}, [[1, "a"]]


def _objects() -> Iterator[Case]:
    yield "properties", {"type": "object", "properties": {"a": INTEGER}}, [{}, {"a": 1}, {"a": 1, "z": None}]
    yield "required", closed({"a": INTEGER}), [{"a": 1}]
    yield "required", closed({"a": INTEGER, "b": STRING}, "b"), [{"b": "x"}, {"a": 1, "b": "x"}]
    yield (
        "required",
        closed({"a": DIGIT, "b": DIGIT, "c": DIGIT}, "a", "c"),
        [{"a": 1, "c": 2}, {"a": 1, "b": 2, "c": 3}],
    )
    yield "required", {"type": "object", "required": ["z"]}, [{"z": 1}]
    yield "additionalProperties", {"type": "object", "additionalProperties": False}, [{}]
    yield "additionalProperties", {"type": "object", "additionalProperties": DIGIT}, [{}, {"k": 1, "l": 2}]
    schema = {"type": "object", "properties": {"a": BOOLEAN}, "additionalProperties": {"type": "null"}}
    yield "additionalProperties", schema, [{"a": True, "b": None}]
    schema = {"type": "object", "patternProperties": {"^x": DIGIT}, "additionalProperties": False}
    yield "patternProperties", schema, [{}, {"x1": 1, "xy": 2}]
    schema = {"type": "object", "patternProperties": {"^x": DIGIT, "^y": BOOLEAN}, "additionalProperties": False}
    yield "patternProperties", schema, [{"x": 1}, {"ya": True}]
    schema = closed({"a": DIGIT}, patternProperties={"^b[0-9]$": BOOLEAN})
    yield "patternProperties", schema, [{"a": 1}, {"a": 1, "b2": True}]
    options = {"a": DIGIT, "b": DIGIT, "c": DIGIT}
    base = {"type": "object", "properties": options, "additionalProperties": False}
    yield "minProperties", {**base, "required": ["a", "b", "c"], "minProperties": 2}, [{"a": 1, "b": 1, "c": 1}]
    optional = {"type": "object", "properties": {"a": DIGIT, "b": DIGIT, "c": DIGIT}, "additionalProperties": False}
    yield "minProperties", {**optional, "minProperties": 1}, [{"a": 1}, {"b": 1, "c": 2}]
    yield "maxProperties", {**optional, "maxProperties": 1}, [{}, {"b": 1}]
    yield "maxProperties", {"type": "object", "additionalProperties": DIGIT, "maxProperties": 2}, [{}, {"a": 1, "b": 2}]
    yield "minProperties", {"type": "object", "additionalProperties": DIGIT, "minProperties": 1}, [{"a": 1}]
    for count in (5, 20, 60):
        properties = {f"field_{i}": [DIGIT, BOOLEAN, SHORT][i % 3] for i in range(count)}
        document = {name: [1, True, "a"][i % 3] for i, name in enumerate(properties)}
        yield "properties", closed(properties), [document]
    yield (
        "properties",
        closed({'quo"te': DIGIT, "new\nline": DIGIT, "日本": DIGIT}),
        [{'quo"te': 1, "new\nline": 2, "日本": 3}],
    )


def _combinations() -> Iterator[Case]:
    yield "anyOf", {"anyOf": [DIGIT, BOOLEAN]}, [1, True]
    yield "anyOf", {"anyOf": [closed({"a": DIGIT}), closed({"b": DIGIT}), {"type": "null"}]}, [{"a": 1}, {"b": 2}, None]
    yield "anyOf", {"type": "integer", "anyOf": [{"minimum": 10}, {"maximum": 2}]}, [10, 2, -5]
    yield "anyOf", {"anyOf": [{"type": "string", "pattern": "^a+$"}, {"const": "b"}]}, ["aa", "b"]
    yield "oneOf", {"oneOf": [{"type": "integer"}, {"type": "string"}]}, [1, "a"]
    kinds = [closed({"kind": {"const": name}, name: DIGIT}) for name in ("circle", "square", "line")]
    yield "oneOf", {"oneOf": kinds}, [{"kind": "circle", "circle": 1}, {"kind": "line", "line": 2}]
    yield "oneOf", {"oneOf": [{"type": "string", "const": "a"}, {"type": "integer", "const": 2}]}, ["a", 2]
    yield "allOf", {"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 8}]}, [3, 8]
    yield "allOf", {"allOf": [{"type": "integer", "multipleOf": 2}, {"multipleOf": 3}]}, [0, 6, -12]
    yield "allOf", {"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 3}]}, ["ab", "abc"]
    one = {"type": "object", "properties": {"a": DIGIT}, "required": ["a"]}
    merged = {"allOf": [one, {"properties": {"b": BOOLEAN}, "required": ["b"]}]}
    yield "allOf", merged, [{"a": 1, "b": True}]
    yield "allOf", {"type": "string", "allOf": [{"pattern": "a"}, {"pattern": "b"}]}, ["ab", "ba"]


def _references() -> Iterator[Case]:
    yield "$ref", {"$defs": {"n": DIGIT}, "type": "array", "items": {"$ref": "#/$defs/n"}}, [[], [1, 2]]
    yield "$ref", {"definitions": {"n": DIGIT}, "$ref": "#/definitions/n"}, [7]
    yield "$ref", {"$defs": {"n": INTEGER}, "$ref": "#/$defs/n", "minimum": 5}, [5]
    yield "$anchor", {"$defs": {"n": {"$anchor": "num", **DIGIT}}, "$ref": "#num"}, [3]
    yield "$id", {"$id": "http://a.example/root", "$defs": {"n": {"$id": "n", **DIGIT}}, "$ref": "n"}, [3]
    tree = closed({"value": DIGIT, "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}})
    yield "$ref", tree, [{"value": 1, "children": []}, {"value": 1, "children": [{"value": 2, "children": []}]}]
    chain = closed({"value": DIGIT, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}})
    yield "$ref", chain, [{"value": 1, "next": {"value": 2, "next": None}}]
    even_odd = {
        "$defs": {
            "even": closed({"odd": {"anyOf": [{"$ref": "#/$defs/odd"}, {"type": "null"}]}}),
            "odd": closed({"even": {"anyOf": [{"$ref": "#/$defs/even"}, {"type": "null"}]}}),
        },
        "$ref": "#/$defs/even",
    }
    yield "$ref", even_odd, [{"odd": None}, {"odd": {"even": {"odd": None}}}]


def _annotations() -> Iterator[Case]:
    for word, value in {
        "title": "T", "description": "D", "default": 3, "examples": [1], "deprecated": True, "readOnly": True, "writeOnly": True,
        "$comment": "c", "$schema": "https://json-schema.org/draft/2020-12/schema", "contentMediaType": "text/plain",
        "contentEncoding": "base64", "x-anything": 1,
    }.items():  # fmt: skip
        yield "annotations", {**SHORT, word: value}, ["abc"]


def _everyday() -> Iterator[Case]:
    address = closed({"street": SHORT, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}})
    person = closed({"name": SHORT, "age": {"type": "integer", "minimum": 0, "maximum": 150}, "address": address})
    yield "everyday", person, [{"name": "Ann", "age": 30, "address": {"street": "Main", "zip": "12345"}}]
    call = {
        "anyOf": [
            closed({"name": {"const": n}, "arguments": closed({a: DIGIT})}) for n, a in (("add", "x"), ("neg", "y"))
        ]
    }
    yield "everyday", call, [{"name": "neg", "arguments": {"y": 3}}]
    yield (
        "everyday",
        {"type": "array", "items": call, "minItems": 1, "maxItems": 3},
        [[{"name": "add", "arguments": {"x": 1}}]],
    )
    for depth in range(1, 9):
        schema: dict[str, Any] = DIGIT
        document: Any = 5
        for level in range(depth):
            schema, document = closed({f"level{level}": schema}), {f"level{level}": document}
        yield "everyday", schema, [document]
    for count in range(1, 9):
        options = {f"choice_{i}": {"anyOf": [DIGIT, {"type": "null"}]} for i in range(count)}
        yield "everyday", closed(options), [dict.fromkeys(options)]


def accepted_cases() -> list[Case]:
    """Schemas that must be followed."""
    makers = (
        _types,
        _numbers,
        _strings,
        _fixed,
        _arrays,
        _objects,
        _combinations,
        _references,
        _annotations,
        _everyday,
    )
    cases = [case for make in makers for case in make()]
    wrapped = [
        (word, closed({"inner": schema}), [{"inner": doc} for doc in docs]) for word, schema, docs in cases[1::3]
    ]
    listed = [
        (word, {"type": "array", "items": schema, "maxItems": 2}, [[doc] for doc in docs])
        for word, schema, docs in cases[2::5]
    ]
    return cases + [case for case in (*wrapped, *listed) if "$ref" not in str(case[1])]  # "#" would be another place


OPTIONAL = {"type": "object", "properties": {"a": DIGIT, "b": DIGIT, "c": DIGIT}, "additionalProperties": False}
REFUSED_CASES: list[tuple[str, Any]] = [
    ("not", {"not": {"type": "string"}}),
    ("if/then/else", {"if": {"minimum": 1}, "then": {"maximum": 5}}),
    ("if/then/else", {"if": {"minimum": 1}, "else": {"maximum": 5}}),
    ("contains", {"type": "array", "contains": {"type": "integer"}}),
    ("minContains", {"type": "array", "contains": {"type": "integer"}, "minContains": 2}),
    ("maxContains", {"type": "array", "contains": {"type": "integer"}, "maxContains": 2}),
    ("uniqueItems", {"type": "array", "uniqueItems": True}),
    ("propertyNames", {"type": "object", "propertyNames": {"maxLength": 3}}),
    ("dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}}),
    ("dependentSchemas", {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}),
    ("dependencies", {"type": "object", "dependencies": {"a": ["b"]}}),
    ("unevaluatedItems", {"type": "array", "unevaluatedItems": False}),
    ("unevaluatedProperties", {"type": "object", "unevaluatedProperties": False}),
    ("$dynamicRef", {"$dynamicRef": "#x"}),
    ("$recursiveRef", {"$recursiveRef": "#"}),
    ("$ref", {"$ref": "https://elsewhere.example/schema"}),
    ("$ref", {"$ref": "#/$defs/missing"}),
    ("oneOf", {"oneOf": [{"type": "integer"}, {"type": "number"}]}),
    ("oneOf", {"oneOf": [{"minimum": 1}, {"maximum": 5}]}),
    ("format", {"type": "string", "format": "phone"}),
    ("format", {"type": "string", "format": "regex"}),
    ("pattern", {"type": "string", "pattern": "(?!a)b"}),
    ("pattern", {"type": "string", "pattern": r"(a)\1"}),
    ("pattern", {"type": "string", "pattern": "("}),
    ("minProperties", {"type": "object", "minProperties": 2}),
    ("minProperties", {**OPTIONAL, "minProperties": 2}),
    ("maxProperties", {**OPTIONAL, "minProperties": 1, "maxProperties": 2}),
    ("oneOf", {"oneOf": [{"const": 1}, {"const": 2}]}),
    ("multipleOf", {"type": "integer", "multipleOf": 1_000_003}),
    ("type", {"type": "text"}),
    ("type", False),
    ("enum", {"enum": []}),
    ("minLength/maxLength", {"type": "string", "minLength": 5, "maxLength": 2}),
    ("minimum/maximum", {"type": "integer", "minimum": 5, "maximum": 2}),
    ("older drafts", {"type": "integer", "divisibleBy": 2}),
    ("older drafts", {"extends": {"type": "integer"}}),
    ("older drafts", {"disallow": "string"}),
    ("OpenAPI", {"type": "string", "nullable": True}),
]
"""(keyword, schema) that must be refused by name."""
