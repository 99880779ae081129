"""Schemas of which no value is finite, against an oracle that writes values with so much fuel."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.grammars._endless import endless
from infer.grammars._json_schema import subschemas

NAMES = ("a", "b", "c")
references = st.sampled_from([{"$ref": f"#/$defs/{name}"} for name in NAMES])
parts = st.recursive(
    st.one_of(references, st.just({"type": "null"})),
    lambda inner: st.one_of(
        st.builds(lambda some: {"anyOf": some}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda some: {"allOf": some}, st.lists(inner, min_size=1, max_size=2)),
        st.builds(lambda part, least: {"type": "array", "items": part, "minItems": least}, inner, st.integers(0, 2)),
        st.builds(
            lambda part, required: {"type": "object", "properties": {"x": part}, "required": required},
            inner,
            st.sampled_from([[], ["x"], ["y"]]),
        ),
    ),
    max_leaves=5,
)


def can_be_written(part: dict[str, Any], defs: dict[str, Any], fuel: int) -> bool:
    """Whether a value is finite after so many references at most; an alternative that can be written is enough."""
    if "$ref" in part:
        return fuel > 0 and can_be_written(defs[part["$ref"].rpartition("/")[2]], defs, fuel - 1)
    if "anyOf" in part:
        return any(can_be_written(one, defs, fuel) for one in part["anyOf"])
    if "allOf" in part:
        return all(can_be_written(one, defs, fuel) for one in part["allOf"])
    if part["type"] == "array":
        return part["minItems"] == 0 or can_be_written(part["items"], defs, fuel)
    return part["type"] == "null" or "x" not in part["required"] or can_be_written(part["properties"]["x"], defs, fuel)


@given(st.fixed_dictionaries(dict.fromkeys(NAMES, parts)), parts)
def test_what_never_ends(defs: dict[str, Any], body: dict[str, Any]) -> None:
    root = {**body, "$defs": defs}
    everything = list(subschemas(root))
    writable = all(can_be_written(part, defs, len(NAMES)) for _, part in everything if part is not root)
    assert (endless(root, everything) is None) == (writable and can_be_written(body, defs, len(NAMES)))


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1},
        {"$defs": {"a/b %": {"$ref": "#/$defs/a~1b%20%25"}}},
        {"oneOf": [{"$ref": "#"}, {"allOf": [{"type": "integer"}, {"$ref": "#"}]}]},
    ],
    ids=["whole", "first_items", "pointer", "oneOf"],
)
def test_shapes_that_never_end(schema: dict[str, Any]) -> None:
    assert endless(schema, list(subschemas(schema))) is not None


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/missing"},
        {"$ref": "http://elsewhere.example/x"},
        {"$ref": "#/allOf/0", "allOf": [{"type": "integer"}]},
        {"properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 0},
        {"allOf": [True], "type": "object", "required": [1, "b"], "properties": {"b": False}},
        {"allOf": 3, "anyOf": {}, "$ref": 5, "required": "a", "properties": [], "minItems": "x", "type": ["array"]},
    ],
    ids=["missing", "elsewhere", "own_part", "any_type", "no_items", "booleans", "wrong_types"],
)
def test_what_is_not_understood_ends(schema: dict[str, Any]) -> None:
    assert endless(schema, list(subschemas(schema))) is None
