"""What the optional xgrammar backend refuses before its package is asked; needs no package."""

from __future__ import annotations

from typing import Any

import pytest

from infer import GrammarError
from infer.grammars.xgrammar import check_kept

REFUSED: list[tuple[Any, str]] = [
    ({"not": {}}, "not"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "string", "maxLength": 3}, "maxLength"),
    ({"type": "string", "pattern": "a"}, "pattern"),
    ({"type": "object", "properties": {"a": {"oneOf": [{}]}}}, "properties.a.oneOf"),
    ({"type": "integer", "anyOf": [{"minimum": 1}]}, "anyOf beside type"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {}}, "minimum": 5}, "beside minimum"),
    ({"$ref": "https://elsewhere.example"}, "elsewhere"),
    ({"type": "object", "required": ["z"]}, "required"),
    ({"const": [1]}, "array or object"),
    ({"minimum": 3}, "state the type"),
    ({"allOf": [{"type": "integer"}, {"type": "number"}]}, "allOf"),
]


@pytest.mark.row("TOOLS-XGRAMMAR", "unsupported schemas say so")
@pytest.mark.parametrize(("schema", "word"), REFUSED, ids=[word for _, word in REFUSED])
def test_what_the_library_does_not_keep_is_refused_by_name(schema: Any, word: str) -> None:
    with pytest.raises(GrammarError) as refused:
        check_kept(schema)
    assert word in str(refused.value)


def test_what_it_keeps_passes() -> None:
    check_kept(
        {
            "$defs": {"n": {"type": "integer", "minimum": 0}},
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/n"}, "b": {"enum": ["x", 1]}, "c": {"anyOf": [{"type": "null"}]}},
            "required": ["a"],
            "additionalProperties": False,
        }
    )
