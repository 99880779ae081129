"""`PluginTests` over the example plugin, and over plugins whose declaration is wrong."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pluggy
import pytest

from infer.plugins import ParserSpec, TokenizerSpec, hookimpl
from infer.plugins.contracts import CONTRACTS
from infer.testing.conformance import PluginTests, checks, declared

HELLO = Path(__file__).parents[2] / "examples" / "plugins" / "hello" / "infer_hello.py"


def hello() -> ModuleType:
    spec = importlib.util.spec_from_file_location("infer_hello", HELLO)
    assert spec is not None and spec.loader is not None
    module = sys.modules.setdefault("infer_hello", importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


class TestHello(PluginTests):
    plugin = hello()


def test_everything_that_a_module_declares_is_found() -> None:
    assert [(kind, spec.name) for kind, spec in declared(hello())] == [
        ("storage_target", "hello-log"),
        ("model_source", "hello"),
    ]


def test_a_hook_that_does_not_exist_is_told() -> None:
    class Typo:
        @hookimpl
        def infer_parser(self) -> list[ParserSpec]:
            return []

    with pytest.raises(pluggy.PluginValidationError, match="infer_parser"):
        declared(Typo())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"api": 7}, "built for version 7 of the parser contract, this infer supports 1; upgrade infer-engine"),
        ({"factory": "no colon"}, "factory 'no colon' is not of the form"),
        ({"factory": "infer.errors:missing"}, "has no attribute 'missing'"),
        ({"factory": "infer.plugins.parser:API_VERSION"}, "cannot be called"),
        ({"fingerprints": "text"}, "a field of its ParserSpec is wrong"),
        ({"name": ""}, "its name is empty"),
    ],
)
def test_a_wrong_declaration_fails_its_check(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    fields: dict[str, Any] = {"name": "x", "api": 1, "factory": "infer.errors:shown", "fingerprints": ("<x>",)}
    spec = ParserSpec(**{**fields, "example": {}, **change})
    [declaration] = [check for check in checks("parser", spec, tmp_path) if check.name == "declaration"]
    with pytest.raises((AssertionError, AttributeError), match=said):
        declaration.run()


def test_a_plugin_of_the_previous_version_is_told_to_its_author(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CONTRACTS, "parser", CONTRACTS["parser"]._replace(version=2, changes="feed takes no ids"))
    spec = ParserSpec(name="x", api=1, factory="infer.errors:shown", fingerprints=("<x>",), example={})
    check = next(checks("parser", spec, tmp_path))
    with pytest.raises(AssertionError, match=r"built for version 1 .* the current one is 2 \(feed takes no ids\)"):
        check.run()


def test_what_cannot_be_made_fails_and_is_not_skipped(tmp_path: Path) -> None:
    spec = TokenizerSpec(name="x", api=1, factory="infer.errors:shown", probe="infer.errors:shown", example={})
    *_, last = checks("tokenizer", spec, tmp_path)
    assert last.name == "can_be_made"
    with pytest.raises(AssertionError, match='the example has no "files"'):
        last.run()
