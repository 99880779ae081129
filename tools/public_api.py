"""Builds docs/api.md from the source: every public name with its signature, fields and the first words of its docstring.
Runs by hand (`make docs`); a test calls `render` and compares, so no signature changes unseen. Owns docs/api.md."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from generated_page import write_or_check

import infer
import infer.artifacts
import infer.plugins
from infer.plugins.contracts import CONTRACTS

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "api.md"
KITS = ROOT / "src" / "infer" / "testing" / "kits"
INTRODUCTION = """\
# Public names

Built by `make docs` from the source; never edited by hand. These names are promises: everything in `infer`, `infer.plugins`,
`infer.artifacts`, `infer.testing.conformance` and `infer.testing.kits`, and the parts of plugins below. Whatever is not listed
here may change without notice. `infer.__version__` is the installed version.
"""
PARTS = """\
What plugins are made of beside contracts, imported from where it says. For the output formats of models, tables that say how
calls and reasoning are written ([Output parsers](parsers.md); `HeaderCalls` and `XmlCalls` also have the fields of
`SectionCalls`), and short forms of the events that a transcript expects, which may name the tools in `SAMPLE_TOOLS`: all from
`infer.plugins.parsing`. For fields, platforms and models, the facts that they give or are given. What a model is built of
beside these (`infer.layers`, `infer.weights.mapping`) may still change without notice.\
"""
PARSING = "infer.plugins.parsing"
_MACHINERY = re.compile(r"\| `(read|read_call|nexts|closers|openers|opener_is_body)(\(| ->)")
FACTS = {
    "infer.config.capture": ("CaptureProfile",),
    "infer.config.platform": ("PlatformLimits",),
    "infer.config.model": ("ModelConfig", "KVLayout", "KVGroup", "KVLayer", "RoutedLayer"),
}
HOOKS = """\
Functions that a plugin's module may have, marked with `@infer.plugins.hookimpl`; the entry point in the group `infer` names the
module. Each is called once, when a registry is built, and returns specs. The version is what a spec's `api` says today; the one
before it is served too ([what is promised](stability.md)).\
"""


def render() -> str:
    """The whole page."""
    page = [INTRODUCTION, "## infer", ""]
    names = [name for name in infer.__all__ if name != "__version__"]
    for name in names:
        if not name.endswith("Error"):
            page += entry(infer._home(name), name)
    page += ["### Errors", "", "| error | is a | meaning |", "| --- | --- | --- |"]
    page += [error_row(infer._home(name), name) for name in names if name.endswith("Error")]
    page += ["", "## Hooks", "", HOOKS, "", "| hook | kind | version | meaning |", "| --- | --- | --- | --- |"]
    page += hook_rows((ROOT / "src" / "infer" / "plugins" / "hookspecs.py").read_text("utf-8"))
    page += ["", "## infer.plugins", ""]
    for module, homes in infer.plugins._HOMES.items():
        for name in homes:
            page += entry(f"infer.plugins.{module}", name)
    page += ["## Parts of plugins", "", PARTS, ""]
    for module, name in parts():
        lines = entry(module, name)
        if module.startswith(PARSING):  # the address to import from; what the machine calls is its own business
            lines = [line.replace(module, PARSING) for line in lines if not _MACHINERY.match(line)]
        page += lines
    page += ["## infer.artifacts", ""]
    for module, homes in infer.artifacts._HOMES.items():
        for name in homes:
            page += entry(f"infer.artifacts.{module}", name)
    page += ["## infer.testing.conformance", ""]
    for name in ("declared", "checks", "PluginTests"):
        page += entry("infer.testing.conformance", name)
    page += ["## infer.testing.kits", ""]
    page += ["Checks that a correct plugin passes, as `Check(name, run)`.", "", "| kit | promise |", "| --- | --- |"]
    for path in sorted(KITS.glob("*.py")):
        if not path.stem.startswith("_"):
            checks = definition(f"infer.testing.kits.{path.stem}", "checks")
            page.append(f"| {code(f'{path.stem}.{head(checks)}')} | {module_summary(path)} |")
    return "\n".join(page) + "\n"


def parts() -> Iterator[tuple[str, str]]:
    """(module, name) of what is public outside of the packages with an `__all__`, where it is defined."""
    package = ast.parse((ROOT / "src/infer/plugins/parsing/__init__.py").read_text("utf-8"))
    for node in package.body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("infer."):
            yield from ((node.module, alias.name) for alias in node.names if not alias.name.isupper())
    yield "infer.plugins.parsing.calls_section", "SectionCalls"
    for module, names in FACTS.items():
        yield from ((module, name) for name in names)


def hook_rows(source: str) -> list[str]:
    """A row for each hook in the source of `infer.plugins.hookspecs`."""
    contracts = {contract.hook: (kind, contract.version) for kind, contract in CONTRACTS.items()}
    hooks = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    return [
        f"| {code(head(hook))} | {contracts[hook.name][0]} | {contracts[hook.name][1]} | {summary(hook)} |"
        for hook in hooks
    ]


def entry(module: str, name: str) -> list[str]:
    """A heading, the docstring and a table of fields and methods."""
    node = definition(module, name)
    if isinstance(node, ast.Assign):
        return [f"### {name}", "", code(f"{name} = {ast.unparse(node.value)}"), ""]
    title = code(head(node)) if not isinstance(node, ast.ClassDef) else f"`{module}`"
    lines = [f"### {name}", "", f"{title}: {summary(node)}".rstrip(": "), ""]
    rows = list(members(node)) if isinstance(node, ast.ClassDef) else []
    if rows:
        lines += ["| member | meaning |", "| --- | --- |", *rows, ""]
    return lines


def error_row(module: str, name: str) -> str:
    node = definition(module, name)
    base = ast.unparse(node.bases[0]) if isinstance(node, ast.ClassDef) else ""
    return f"| {code(name)} | {code(base)} | {summary(node)} |"


Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Assign


def definition(module: str, name: str) -> Definition:
    """The statement that defines a name at the top of a module."""
    path = ROOT / "src" / module.replace(".", "/")
    source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text("utf-8")
    for node in ast.parse(source).body:
        named = getattr(node, "name", None)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            named = node.targets[0].id
        if named == name and isinstance(node, Definition):
            return node
    raise LookupError(f"{module} does not define {name}")


def members(node: ast.ClassDef) -> Iterator[str]:
    """Fields in order, then methods; a string after a field is its meaning."""
    for item, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and not hidden(item.target.id):
            said = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            yield f"| {code(ast.unparse(item))} | {flat(str(said))} |"
    for item in node.body:
        if not isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        overload = any(ast.unparse(decorator) == "overload" for decorator in item.decorator_list)
        if not overload and (item.name == "__init__" or not hidden(item.name)):
            yield f"| {code(head(item, node.name))} | {summary(item)} |"


def head(node: Definition, owner: str = "") -> str:
    """A signature as a caller writes it, without self and without private parameters."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        raise TypeError(f"{ast.unparse(node)} is not a function")
    given, decorators = node.args, [ast.unparse(decorator) for decorator in node.decorator_list]
    result = f" -> {ast.unparse(node.returns)}" if node.returns is not None and node.name != "__init__" else ""
    if "property" in decorators:
        return f"{node.name}{result}"
    positional = given.args[1:] if given.args and given.args[0].arg in ("self", "cls") else given.args
    keywords = [(a, d) for a, d in zip(given.kwonlyargs, given.kw_defaults, strict=True) if not hidden(a.arg)]
    shown = ast.arguments(
        posonlyargs=[],
        args=positional,
        vararg=given.vararg,
        kwonlyargs=[a for a, _ in keywords],
        kw_defaults=[d for _, d in keywords],
        kwarg=given.kwarg,
        defaults=given.defaults,
    )
    name = owner if node.name == "__init__" else node.name
    prefix = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    return f"{prefix}{name}({ast.unparse(shown)}){result}"


def hidden(name: str) -> bool:
    return name.startswith("_")


def summary(node: Definition) -> str:
    """The first paragraph of the docstring in one line."""
    text = "" if isinstance(node, ast.Assign) else ast.get_docstring(node) or ""
    return flat(text.split("\n\n")[0])


def module_summary(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    return flat(text.split("\n\n")[0])


def flat(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def code(text: str) -> str:
    return f"`{flat(text)}`"


def main(arguments: list[str] | None = None) -> int:
    return write_or_check(PAGE, render(), "the source says", __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
