"""What `import infer` costs and touches, and which imports stay free of torch: each in a fresh interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

HEAVY = (
    "torch",
    "numpy",
    "transformers",
    "tokenizers",
    "triton",
    "pydantic",
    "pluggy",
    "anyio",
    "starlette",
    "fastapi",
    "uvicorn",
    "hypercorn",
    "aiohttp",
    "flask",
    "django",
)
CONTROL_PLANE = (
    "infer.engine.loop",
    "infer.engine.mailbox",
    "infer.engine.outputs",
    "infer.engine.request",
    "infer.engine.step",
    "infer.engine.scheduler.scheduler",
    "infer.engine.kv_cache.manager",
    "infer.types",
    "infer.config.engine",
    "infer.config.resolve",
    "infer.plugins.manager",
    "infer.plugins.model",
    "infer.plugins.platform",
    "infer.text.detokenizer",
    "infer.engine.engine",
)
SURVEY = """
import json, os, sys, time

reads = []

class Environ(type(os.environ)):
    def __getitem__(self, key):
        reads.append(key)
        return super().__getitem__(key)

os.environ.__class__ = Environ
before, start = set(sys.modules), time.perf_counter()
import infer
seconds = time.perf_counter() - start
new = sorted(set(sys.modules) - before)
print(json.dumps({"seconds": seconds, "modules": new, "reads": reads}))
"""


def fresh(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.row("X-IMPORT", "`import infer` leaves no torch, transformers, numpy or web framework in sys.modules")
def test_import_infer_is_cheap_and_touches_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    found: dict[str, Any] = json.loads(fresh(SURVEY))
    roots = {module.partition(".")[0] for module in found["modules"]}
    assert "infer" in roots
    assert roots.isdisjoint(HEAVY)
    assert [module for module in found["modules"] if module.startswith("infer.")] == [], "nothing of ours is resolved"
    assert "importlib.metadata" not in found["modules"], "no entry point is looked up"
    assert found["reads"] == []
    with capsys.disabled():
        print(f"\nimport infer: {found['seconds'] * 1000:.0f} ms (goal: under 200 ms)")


def test_the_survey_sees_a_read_of_the_environment() -> None:
    """The recorder works: the same code with a reader instead of `import infer`."""
    assert json.loads(fresh(SURVEY.replace("import infer", "os.environ.get('HOME')")))["reads"] == ["HOME"]


@pytest.mark.parametrize("module", CONTROL_PLANE)
def test_the_control_plane_imports_no_tensor_library(module: str) -> None:
    code = f"import sys, {module}; print([name for name in ('torch', 'numpy', 'triton') if name in sys.modules])"
    assert fresh(code).strip() == "[]"


def test_declaring_the_control_plane_kinds_imports_no_torch() -> None:
    code = """
import sys
from infer.config.engine import PluginsSection
from infer.plugins import build_registry

registry = build_registry(PluginsSection(allow=()))
assert registry.specs("tokenizer") and registry.specs("model_source")
print("torch" in sys.modules)
registry.specs("model")
print("torch" in sys.modules)
"""
    assert fresh(code).split() == ["False", "True"]
