"""The pages that are built are current, links lead somewhere, and nothing private is in what we publish."""

from __future__ import annotations

import csv
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from infer.config import env
from integration.documented_code import PAGES, ROOT


def load_tool(name: str) -> ModuleType:
    """Import tools/NAME.py, which is not on the path."""
    spec = importlib.util.spec_from_file_location(f"tool_{name}", ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.row("LOAD-CONFIG-SURFACE", "the configuration reference is generated from the settings types and current")
def test_configuration_page_is_current() -> None:
    tool = load_tool("config_reference")
    assert tool.PAGE.read_text("utf-8") == tool.render(), "run `make docs` and commit the page"


@pytest.mark.row("X-STRICT-FIELDS", "the list in the docs is generated from code and current")
def test_fields_page_is_current() -> None:
    tool = load_tool("field_reference")
    assert tool.PAGE.read_text("utf-8") == tool.render_page(), "run `make docs` and commit the page"


def test_configuration_page_names_the_process_variables() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text("utf-8")
    assert [name for name in env._OWN if name not in page] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text("utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_documented_paths_exist() -> None:
    """Examples and tools that a page mentions in backticks."""
    for page in PAGES:
        for path in re.findall(r"`((?:examples|tools|docs|tests)/[\w./-]+)`", page.read_text("utf-8")):
            assert (ROOT / path).exists(), f"{page.name} mentions {path}"


def test_capabilities_are_well_formed() -> None:
    with (ROOT / "docs" / "capabilities.tsv").open(encoding="utf-8", newline="") as source:
        rows = list(csv.DictReader(source, delimiter="\t", quoting=csv.QUOTE_NONE))
    ids = [row["id"] for row in rows]
    assert len(ids) == len(set(ids)) > 100
    assert all(
        row["description"] and row["acceptance"] and row["milestone"] in load_tool("status").MILESTONES for row in rows
    )
    assert sum(row["milestone"] == "engine" for row in rows) == 36


def test_examples_directory_holds_what_the_tests_run() -> None:
    """test_docs_examples.py has one test for each; a new example needs one there."""
    source = (ROOT / "tests" / "integration" / "test_docs_examples.py").read_text("utf-8")
    assert [path.name for path in (ROOT / "examples").glob("*.py") if path.name not in source] == []
