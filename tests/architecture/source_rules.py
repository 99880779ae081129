"""House rules that a linter does not know, each a function from a module's name and source to complaints.

Run by `test_source_rules.py` over the product and over planted violations; owns nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

MAX_CARD_LINES = 3
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 90
MAX_ABSTRACT_METHODS = 8
MAX_PUBLIC_METHODS = 12
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "tools"}

LAZY_PREFIXES = ("infer.cli", "infer.artifacts.exporters")
"""Packages whose functions may import: commands start quickly, exporters need optional packages."""
LAZY_IMPORTS: dict[str, set[str]] = {
    "infer.api.artifacts": {"infer.artifacts.assembly", "infer.artifacts.exporters"},
    "infer.api.connections": {"hypercorn"},
    "infer.artifacts.pipeline": {"infer.artifacts.assembly"},
    "infer.engine.startup": {"infer.engine.worker.builder", "infer.weights.facts"},
    "infer.grammars": {"llguidance", "llguidance.gbnf_to_lark", "xgrammar"},
    "infer.testing.conformance": {"infer.testing.kits"},
    "infer.testing.moe_from_dense": {"safetensors.torch"},
    "infer.testing.tiny_models": {"transformers"},
    "infer.text.chat_template": {"infer.text.sandbox"},
    "infer.tokenizers": {"tokenizers", "infer.tokenizers", "infer.weights.gguf"},
}
"""Module or package -> what its functions may import: heavy or optional, needed by some engines only, and not when a
registry scans the module."""
DYNAMIC_IMPORTERS = {
    "infer.testing.tiny_models",
    "infer",
    "infer.artifacts",
    "infer.plugins",
    "infer.plugins.builtins",
    "infer.plugins.manager",
    "infer.plugins.registry",
}
ENVIRONMENT_READERS = {"infer.config.env"}

Rule = Callable[[str, str], list[str]]


def card(module: str, source: str) -> list[str]:
    """A module opens with a card of one to three lines."""
    text = ast.get_docstring(ast.parse(source))
    if not text:
        return [f"{module}: no card (module docstring)"]
    lines = [line for line in text.splitlines() if line.strip()]
    return [f"{module}: card of {len(lines)} lines"] if len(lines) > MAX_CARD_LINES else []


def sizes(module: str, source: str) -> list[str]:
    """Files and functions fit in a reader's head."""
    found = []
    count = len(source.splitlines())
    if count >= MAX_FILE_LINES:
        found.append(f"{module}: {count} lines")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length >= MAX_FUNCTION_LINES:
                found.append(f"{module}:{node.lineno}: {node.name} has {length} lines")
    return found


def names(module: str, source: str) -> list[str]:
    """A module is called after what it does."""
    return [f"{module}: {part!r} says nothing" for part in module.split(".") if part in VAGUE_NAMES]


def lazy_imports(module: str, source: str) -> list[str]:
    """Imports stand at the top of a file, where the import contracts and a reader see them."""
    found = []
    if module.startswith(LAZY_PREFIXES):
        return []
    allowed = {
        name for key, names in LAZY_IMPORTS.items() if module == key or module.startswith(key + ".") for name in names
    }
    for function in _functions(ast.parse(source)):
        for node in ast.walk(function):
            for name in _imported(node):
                if not any(name == known or name.startswith(known + ".") for known in allowed):
                    found.append(f"{module}:{node.lineno}: imports {name} inside a function")  # type: ignore[attr-defined]
    return sorted(set(found))


def dynamic_imports(module: str, source: str) -> list[str]:
    """Only the registry and the lazy exports import by string."""
    if module in DYNAMIC_IMPORTERS:
        return []
    dynamic = {"import_module", "__import__"}
    return [f"{module}:{line}: {name}" for line, name in _names(ast.parse(source)) if name in dynamic]


def environment(module: str, source: str) -> list[str]:
    """One module reads the environment."""
    if module in ENVIRONMENT_READERS:
        return []
    reads = {"environ", "getenv", "environb", "putenv"}
    return [f"{module}:{line}: {name}" for line, name in _names(ast.parse(source)) if name in reads]


def prints(module: str, source: str) -> list[str]:
    """The library never writes to standard output by itself."""
    used = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name) and node.id == "print"]
    return [f"{module}:{node.lineno}: print" for node in used]


def module_state(module: str, source: str) -> list[str]:
    """No state lives in a module: nothing is declared `global`, and module-level containers are constants by name."""
    tree = ast.parse(source)
    found = [f"{module}:{node.lineno}: global" for node in ast.walk(tree) if isinstance(node, ast.Global)]
    containers = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, containers):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name) and not target.id.isupper() and target.id != "__all__":
                    found.append(f"{module}:{node.lineno}: {target.id} is a mutable module variable")
    return found


def contract_sizes(module: str, source: str) -> list[str]:
    """A contract that grows past a screen becomes an optional `SupportsX`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ClassDef) or "Protocol" not in [_base_name(base) for base in node.bases]:
            continue
        methods = [item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
        public = [method for method in methods if not method.name.startswith("_")]
        abstract = [method for method in methods if _is_abstract(method)]
        if len(abstract) > MAX_ABSTRACT_METHODS:
            found.append(f"{module}: {node.name} has {len(abstract)} abstract methods")
        if len(public) > MAX_PUBLIC_METHODS:
            found.append(f"{module}: {node.name} has {len(public)} public methods")
    return found


RULES: tuple[Rule, ...] = (
    card,
    sizes,
    names,
    lazy_imports,
    dynamic_imports,
    environment,
    prints,
    module_state,
    contract_sizes,
)


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or "."] if isinstance(node, ast.ImportFrom) else []


def _names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Names that are used, as a variable, as an attribute, or imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.lineno, alias.name


def _base_name(base: ast.expr) -> str:
    if isinstance(base, ast.Subscript):
        base = base.value
    return base.attr if isinstance(base, ast.Attribute) else base.id if isinstance(base, ast.Name) else ""


def _is_abstract(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """In a protocol: the body is only a docstring and an ellipsis."""
    rest = [node for node in method.body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
    return not rest
