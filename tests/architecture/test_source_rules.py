"""The product against the house rules of `source_rules`, and each rule against a planted violation."""

from __future__ import annotations

from pathlib import Path

import pytest

from architecture import source_rules
from architecture.source_rules import RULES, Rule

SOURCE = Path(__file__).parents[2] / "src"
PLANTED: dict[str, tuple[str, list[str]]] = {
    "card": ('"""One.\n\nTwo.\nThree.\nFour.\n"""\n', ["infer.planted: card of 4 lines"]),
    "sizes": (
        "def long() -> None:\n" + "    x = 1\n" * 100 + "\n" * 300,
        ["infer.planted: 401 lines", "infer.planted:1: long has 101 lines"],
    ),
    "lazy_imports": (
        "class A:\n    async def f(self) -> None:\n        from torch import nn\n        import numpy.linalg\n",
        [
            "infer.planted:3: imports torch inside a function",
            "infer.planted:4: imports numpy.linalg inside a function",
        ],
    ),
    "dynamic_imports": (
        "import importlib\nfrom importlib import import_module as load\nimportlib.import_module('infer.models.llama')\n",
        ["infer.planted:2: import_module", "infer.planted:3: import_module"],
    ),
    "environment": (
        "import os\nfrom os import environ as e\nHOME = os.getenv('HOME')\n",
        ["infer.planted:2: environ", "infer.planted:3: getenv"],
    ),
    "prints": ("def f() -> None:\n    console.print('x')\n    print('hello')\n", ["infer.planted:3: print"]),
    "module_state": (
        "cache = {}\nLIMITS = {'a': 1}\nseen: list[int] = []\ndef f() -> None:\n    global cache\n",
        [
            "infer.planted:1: cache is a mutable module variable",
            "infer.planted:3: seen is a mutable module variable",
            "infer.planted:5: global",
        ],
    ),
    "contract_sizes": (
        "from typing import Protocol\nclass Wide(Protocol[T]):\n"
        + "".join(f"    def a{i}(self) -> None: ...\n" for i in range(9))
        + "".join(f"    def c{i}(self) -> int:\n        return 1\n" for i in range(4)),
        ["infer.planted: Wide has 9 abstract methods", "infer.planted: Wide has 13 public methods"],
    ),
}


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        found[".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")] = path
    return found


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_product_keeps_the_rule(rule: Rule) -> None:
    found = modules()
    assert len(found) > 50
    assert [complaint for module, path in found.items() for complaint in rule(module, path.read_text())] == []


@pytest.mark.parametrize("name", PLANTED)
def test_the_rule_finds_a_planted_violation(name: str) -> None:
    source, complaints = PLANTED[name]
    rule: Rule = getattr(source_rules, name)
    assert sorted(rule("infer.planted", source)) == sorted(complaints)


def test_a_vague_module_name_is_found() -> None:
    assert source_rules.names("infer.engine.utils", "") == ["infer.engine.utils: 'utils' says nothing"]


def test_a_module_without_a_card_is_found() -> None:
    assert source_rules.card("infer.planted", "x = 1\n") == ["infer.planted: no card (module docstring)"]


def test_every_rule_has_a_planted_violation() -> None:
    assert {rule.__name__ for rule in RULES} == {*PLANTED, "names"}


def test_what_is_allowed_is_still_used() -> None:
    """An exception that nobody needs any more is removed."""
    found = modules()
    for key, allowed in source_rules.LAZY_IMPORTS.items():
        sources = [path.read_text() for name, path in found.items() if name == key or name.startswith(key + ".")]
        for name in allowed:
            used = any(f"  import {name}" in source or f"  from {name}" in source for source in sources)
            assert used, f"nothing in {key} imports {name} lazily any more"
    for module in source_rules.DYNAMIC_IMPORTERS:
        assert "import_module" in found[module].read_text(), f"{module} no longer imports by string"
