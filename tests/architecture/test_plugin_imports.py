"""Templates and example plugins are made of public names: what a stranger copies from them is promised."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import infer
import infer.artifacts
import infer.plugins
import infer.plugins.parsing
from integration.test_docs_pages import load_tool

ROOT = Path(__file__).parents[2]
SOURCES = [*sorted((ROOT / "src/infer/templates").glob("*.py")), *sorted((ROOT / "examples/plugins").glob("*/*.py"))]
UNPROMISED = ("infer.layers.", "infer.weights.mapping", "infer.testing.")
"""What models are built of, said so on the page of names; and the kits, which tests import module by module."""


def imported(source: str) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "infer":
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.startswith("infer."))


def unpromised(source: str) -> list[str]:
    packages = (infer, infer.plugins, infer.plugins.parsing, infer.artifacts)
    public = {(package.__name__, name) for package in packages for name in package.__all__}
    public |= {(module, name) for module, names in load_tool("public_api").FACTS.items() for name in names}
    found = [pair for pair in imported(source) if pair not in public and not pair[0].startswith(UNPROMISED)]
    return [f"{module}.{name}" for module, name in found]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_templates_and_examples_import_what_is_promised(path: Path) -> None:
    assert unpromised(path.read_text("utf-8")) == []


def test_what_is_not_promised_is_seen() -> None:
    source = "from infer.plugins.artifact_field import whole_rows\nfrom infer.engine.loop import Loop\nimport infer.config.env"
    assert unpromised(source) == [
        "infer.plugins.artifact_field.whole_rows",
        "infer.engine.loop.Loop",
        "infer.config.env.",
    ]
