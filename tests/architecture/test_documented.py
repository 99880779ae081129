"""Nothing that a user can write is undocumented: hooks, settings, errors and flags are counted here and looked for on the pages.

What is counted comes from the objects themselves, not from the tools that write the pages.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from pydantic import BaseModel

import infer.errors
from infer.cli.app import build_app
from infer.config.engine import EngineConfig
from infer.plugins import hookspecs
from infer.plugins.contracts import CONTRACTS
from integration.test_docs_pages import load_tool

DOCS = Path(__file__).parents[2] / "docs"


def page(name: str) -> str:
    return (DOCS / name).read_text("utf-8")


def rows(text: str, first: str) -> list[list[str]]:
    """Cells of the table rows whose first cell has this in it, in backticks."""
    found = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in cells] for cells in found if f"`{first}" in cells[0] or f"{first}`" in cells[0]]


def hooks() -> dict[str, str]:
    """Name -> signature."""
    found = {name: value for name, value in vars(hookspecs).items() if name.startswith("infer_")}
    return {name: f"{name}{inspect.signature(value)}".replace("'", "") for name, value in found.items()}


def settings(section: type[BaseModel] = EngineConfig, prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel) and not prefix:
            yield from settings(kind, f"{name}.")
        else:
            yield prefix + name


def errors() -> list[str]:
    return [name for name, value in vars(infer.errors).items() if inspect.isclass(value)]


def flags(command: Any = None) -> Iterator[tuple[str, str]]:
    """(flag, its help), of every command."""
    command = command or typer.main.get_command(build_app())
    for parameter in command.params:
        if parameter.param_type_name == "option":
            for name in (*parameter.opts, *parameter.secondary_opts):
                yield name, parameter.help or ""
    for inner in getattr(command, "commands", {}).values():
        yield from flags(inner)


@pytest.mark.parametrize("hook", hooks())
def test_every_hook_is_documented_with_its_signature_and_version(hook: str) -> None:
    [row] = rows(page("api.md"), f"{hook}(")
    assert row[0] == f"`{hooks()[hook]}`"
    kind, contract = next((kind, contract) for kind, contract in CONTRACTS.items() if contract.hook == hook)
    assert row[1:3] == [kind, str(contract.version)]
    assert row[3]


def test_every_contract_has_its_hook() -> None:
    assert {contract.hook for contract in CONTRACTS.values()} == hooks().keys()


def test_every_setting_is_documented() -> None:
    names = list(settings())
    assert len(names) > 100
    text = page("configuration.md")
    assert [name for name in names if not any(row[0] == f"`{name}`" and row[3] for row in rows(text, name))] == []


def test_every_error_is_documented() -> None:
    text = page("api.md")
    assert [name for name in errors() if not any(row[0] == f"`{name}`" and row[2] for row in rows(text, name))] == []


def test_every_flag_is_documented_and_has_help() -> None:
    found = sorted({name for name, _ in flags()})
    assert len(found) > 100
    text = page("cli.md")
    assert [name for name in found if not rows(text, name)] == []
    assert sorted({name for name, text in flags() if not text}) == []


def test_the_page_of_the_command_line_is_current() -> None:
    tool = load_tool("cli_reference")
    assert page("cli.md") == tool.render(), "run `make docs` and commit the page"


def test_a_hook_that_changes_is_seen() -> None:
    """The page would differ, and its test fail."""
    tool = load_tool("public_api")
    source = Path(str(hookspecs.__file__)).read_text("utf-8")
    changed = source.replace(
        "def infer_parsers() -> list[ParserSpec]", "def infer_parsers(engine: str) -> list[ParserSpec]"
    )
    assert changed != source
    differing = [new for old, new in zip(tool.hook_rows(source), tool.hook_rows(changed), strict=True) if old != new]
    assert len(differing) == 1
    assert "infer_parsers(engine: str)" in differing[0]
    with pytest.raises(KeyError, match="infer_new"):  # a hook without a contract
        tool.hook_rows(source + "\n\ndef infer_new() -> list[int]: ...\n")


def test_what_is_not_on_a_page_is_missed() -> None:
    text = page("configuration.md").replace("`cache.block_size`", "`cache.blocksize`")
    assert rows(text, "cache.block_size") == []
    assert rows(page("api.md").replace("`QueueFullError`", ""), "QueueFullError") == []
    assert rows(page("cli.md").replace("`--log-json`", ""), "--log-json") == []
