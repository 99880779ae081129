"""Who may import whom: the contracts in pyproject.toml hold, cover everything, and each is broken by a planted import."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from infer.plugins.builtins import PACKAGES

ROOT = Path(__file__).parents[2]
SETTINGS: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
CONTRACTS: dict[str, dict[str, Any]] = {contract["name"]: contract for contract in SETTINGS["contracts"]}
# contract -> (module, what is planted at its end)
PLANTED = {
    "The tower: nothing imports what lies above it": ("config/engine.py", "import infer.plugins.registry"),
    "The control plane knows no tensors": ("engine/step.py", "import infer.planted_bridge"),
    "The data plane knows no requests": ("engine/worker/runner.py", "import infer.engine.scheduler.scheduler"),
    "The engine core knows no artifacts": ("engine/request.py", "import infer.artifacts.request"),
    "Nobody imports a leaf": ("engine/loop.py", "import infer.tokenizers.fast"),
    "Kinds of leaves do not know each other": ("sources/local.py", "import infer.tokenizers.fast"),
    "A leaf knows no other leaf of its kind": ("quantization/unquantized.py", "import infer.quantization.gguf"),
    "A leaf knows contracts, not the engine": ("quantization/gguf.py", "import infer.engine.step"),
    "Nobody imports a template": ("api/app.py", "import infer.templates.endpoint"),
    "A template knows what a plugin may know": ("templates/parser.py", "import infer.text.stop"),
    "Nobody imports an artifact field": ("artifacts/codec.py", "import infer.artifacts.fields.moe_routes"),
    "An artifact field knows contracts, no tensors": (
        "artifacts/fields/hidden_states.py",
        "import infer.layers.linear",
    ),
    "The product does not import its test kits": ("text/__init__.py", "import infer.testing"),
    "No cycles": ("engine/kv_cache/block_pool.py", "import infer.engine.kv_cache.manager"),
}


def lint(source: Path) -> dict[str, str]:
    """Contract -> KEPT or BROKEN, for the package found in `source`."""
    environment = {**os.environ, "PYTHONPATH": str(source)}
    code = "from importlinter.cli import lint_imports; import sys; sys.exit(lint_imports(cache_dir=None))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    verdicts = dict(re.findall(r"^(.+) (KEPT|BROKEN)\b.*$", done.stdout, re.MULTILINE))
    assert verdicts, done.stdout + done.stderr
    return verdicts


def test_the_contracts_hold() -> None:
    assert lint(ROOT / "src") == dict.fromkeys(CONTRACTS, "KEPT")


def test_a_planted_import_breaks_each_contract(tmp_path: Path) -> None:
    """All at once, in a copy. The bridge makes one of them indirect and lazy."""
    copy = tmp_path / "src"
    shutil.copytree(ROOT / "src" / "infer", copy / "infer", ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "infer" / "planted_bridge.py").write_text("def f() -> None:\n    import torch\n")
    for module, line in PLANTED.values():
        path = copy / "infer" / module
        path.write_text(f"{path.read_text()}\n{line}\n")
    assert lint(copy) == dict.fromkeys(CONTRACTS, "BROKEN")


def test_every_contract_has_a_planted_violation() -> None:
    assert set(PLANTED) == set(CONTRACTS)


def test_every_package_is_under_contract() -> None:
    """A leaf package that is created later must join the contracts."""
    packages = {f"infer.{path.name}" for path in (ROOT / "src" / "infer").iterdir() if (path / "__init__.py").is_file()}
    leaves = {package for package in PACKAGES.values() if package in packages}
    assert leaves == set(CONTRACTS["Nobody imports a leaf"]["forbidden_modules"])
    assert leaves == set(CONTRACTS["Kinds of leaves do not know each other"]["modules"])
    assert leaves == set(CONTRACTS["A leaf knows contracts, not the engine"]["source_modules"])
    assert packages - leaves - {"infer.testing"} <= set(CONTRACTS["Nobody imports a leaf"]["source_modules"])
    assert packages - {"infer.testing"} <= set(CONTRACTS["The product does not import its test kits"]["source_modules"])
    assert CONTRACTS["Nobody imports an artifact field"]["protected_modules"] == [PACKAGES["artifact_field"]]
    control = {"loop", "mailbox", "outputs", "request", "step", "scheduler", "kv_cache", "aux", "metrics"}
    engine = ROOT / "src" / "infer" / "engine"
    present = {
        f"infer.engine.{name}" for name in control if (engine / name).is_dir() or (engine / f"{name}.py").is_file()
    }
    assert present <= set(CONTRACTS["The control plane knows no tensors"]["source_modules"])
