"""The GPU kernels without a GPU: their results under Triton's interpreter, and what the compiler says of every launch.

Each file of `tests/triton_kernels` runs in a process of its own, for the interpreter is chosen before Triton is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from integration.documented_code import ROOT

KERNEL_TESTS = ROOT / "tests" / "triton_kernels"
NO_TRITON = "Triton is missing; `make install` brings it"


def interpreted(path: Path, tmp_path: Path, profile: str, limit: int) -> None:
    """All tests of a file pass, and there are some."""
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "INFER_INTERPRETED_PROFILE": profile,
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTEST_ADDOPTS": "",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=limit
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def kernel_tests() -> list[str]:
    return sorted(path.name for path in KERNEL_TESTS.glob("test_*.py"))


@pytest.fixture(autouse=True)
def triton_is_there() -> None:
    found = subprocess.run([sys.executable, "-c", "import triton"], capture_output=True, check=False).returncode
    assert found == 0, NO_TRITON


@pytest.mark.parametrize("name", kernel_tests())
def test_results_under_the_interpreter(name: str, tmp_path: Path) -> None:
    interpreted(KERNEL_TESTS / name, tmp_path, "interpreted", limit=280)


@pytest.mark.heavy
@pytest.mark.parametrize("name", kernel_tests())
def test_many_results_under_the_interpreter(name: str, tmp_path: Path) -> None:
    interpreted(KERNEL_TESTS / name, tmp_path, "interpreted-heavy", limit=1500)


@pytest.mark.heavy
def test_every_launch_compiles_within_its_budget(test_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Registers, spills and shared memory of every launch, for every target; the table is printed."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(test_cache / "triton")}
    command = [sys.executable, str(ROOT / "tools" / "kernel_gate.py")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=1700)
    with capsys.disabled():
        print("\n" + done.stdout)
    assert done.returncode == 0, done.stderr[-6000:]
