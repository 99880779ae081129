"""The wheel, as a stranger gets it: built, installed with its dependencies into an empty environment, and asked a question."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from integration.documented_code import ROOT, reader_environment, told

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what git would check out, so that stray files here do not count."""
    directory = tmp_path_factory.mktemp("wheel")
    source = directory / "source"
    source.mkdir()
    listed = ["git", "ls-files", "-z", "pyproject.toml", "README.md", "LICENSE", "src"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(directory), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, told(done)
    return next(directory.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty environment with the wheel and what it requires, nothing else. The path of its bin directory."""
    directory = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True, timeout=300)
    pip = [str(directory / "bin" / "python"), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt")]
    done = subprocess.run([*pip, str(wheel)], capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, told(done)
    return directory / "bin"


def call(installed: Path, cache: Path, cwd: Path, *arguments: str) -> str:
    environment = reader_environment(cache)
    environment.pop("PYTHONPATH", None)
    command = [str(installed / arguments[0]), *arguments[1:]]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300, cwd=cwd, env=environment, input=""
    )
    assert done.returncode == 0, told(done)
    return done.stdout


def test_the_wheel_holds_the_package_and_its_licence(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {"infer/py.typed", "infer/api/web/index.html"} <= set(names)
    assert any(name.endswith("/LICENSE") for name in names)
    assert [name for name in names if not name.startswith(("infer/", "infer_engine-"))] == []
    sources = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "infer").rglob("*.py")}
    tracked = subprocess.run(
        ["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert {name for name in names if name.endswith(".py")} == sources & {name.removeprefix("src/") for name in tracked}


def test_requirements_are_consistent(installed: Path, test_cache: Path, tmp_path: Path) -> None:
    assert "No broken requirements" in call(installed, test_cache, tmp_path, "python", "-m", "pip", "check")


def test_version_comes_from_the_distribution(installed: Path, wheel: Path, test_cache: Path, tmp_path: Path) -> None:
    version = wheel.name.split("-")[1]
    assert version in call(installed, test_cache, tmp_path, "infer", "--version")


def test_plugins_are_found_without_the_source_tree(installed: Path, test_cache: Path, tmp_path: Path) -> None:
    shown = call(installed, test_cache, tmp_path, "infer", "plugins")
    for name in ("llama", "reference", "pypi", "infer-engine"):
        assert name in shown.lower()


@pytest.mark.model
def test_the_demo_command_answers(installed: Path, test_cache: Path, tmp_path: Path) -> None:
    shown = call(
        installed,
        test_cache,
        tmp_path,
        "infer",
        "run",
        "--temperature",
        "0",
        "What is the capital of France? Answer in one sentence.",
    )
    assert "Paris" in shown


def test_development_tools_are_not_required(installed: Path, test_cache: Path, tmp_path: Path) -> None:
    """What only tests use must not have become a run-time dependency."""
    shown = call(installed, test_cache, tmp_path, "python", "-m", "pip", "list", "--format=freeze").lower()
    names = {line.split("==")[0] for line in shown.splitlines()}
    assert "torch" in names
    assert names.isdisjoint({"gguf", "transformers", "pytest", "hypothesis", "mypy", "ruff", "trio"})
