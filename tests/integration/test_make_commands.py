"""`make` says what is missing instead of failing obscurely, installs once, and CI's script is well formed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from integration.documented_code import ROOT


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What `make` reads, and a `python` whose behaviour a test can choose."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    return tmp_path


def make(clone: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", *arguments], cwd=clone, capture_output=True, text=True, check=False, timeout=60)


def fake_python(clone: Path, script: str) -> str:
    path = clone / "fakepython"
    path.write_text(f"#!/bin/sh\n{script}\n", "utf-8")
    path.chmod(0o755)
    return str(path)


# Makes a virtual environment whose python records what it is asked to do.
INSTALLER = """
case "$*" in
  "-m venv .venv") mkdir -p .venv/bin; cp "$0" .venv/bin/python; printf '#!/bin/sh\\necho "asked: $*"\\n' > .venv/bin/infer
                   chmod +x .venv/bin/infer ;;
  *"pip install"*) echo "$*" >> pip.log ;;
esac
"""


def test_an_old_python_is_named(clone: Path) -> None:
    python = fake_python(clone, 'case "$1" in -V) echo Python 3.9.2;; *) exit 1;; esac')
    done = make(clone, "demo", f"PYTHON={python}")
    assert done.returncode != 0
    assert "infer needs Python 3.11 or newer" in done.stdout
    assert "Python 3.9.2" in done.stdout


def test_no_python_is_named(clone: Path) -> None:
    done = make(clone, "demo", "PYTHON=python-that-is-not-here")
    assert done.returncode != 0
    assert "there is no 'python-that-is-not-here' here" in done.stdout


def test_a_python_without_venv_is_named(clone: Path) -> None:
    done = make(clone, "demo", "PYTHON=" + fake_python(clone, 'case "$*" in *ensurepip*) exit 1;; esac'))
    assert done.returncode != 0
    assert "python3-venv" in done.stdout


def test_a_missing_debian_package_is_said(clone: Path) -> None:
    (clone / ".ci" / "packages").write_text("# comment\nno-such-debian-package  # why\n", "utf-8")
    done = make(clone, "demo", "PYTHON=" + fake_python(clone, INSTALLER))
    if shutil.which("dpkg-query"):
        assert "the Debian package no-such-debian-package is missing" in done.stdout
    assert done.returncode == 0, done.stderr


def test_installs_once_and_again_when_the_requirements_change(clone: Path) -> None:
    python = "PYTHON=" + fake_python(clone, INSTALLER)
    log = clone / "pip.log"
    first = make(clone, "demo", python, "QUESTION=Why?")
    assert "asked: run --temperature 0 Why?" in first.stdout, first.stderr
    assert log.read_text("utf-8").count("-c constraints.txt -e .[dev]") == 1
    make(clone, "demo", python)
    assert len(log.read_text("utf-8").splitlines()) == 1
    os.utime(clone / "pyproject.toml")  # a fresh checkout changes times, not contents
    make(clone, "demo", python)
    assert len(log.read_text("utf-8").splitlines()) == 1
    with (clone / "constraints.txt").open("a", encoding="utf-8") as file:
        file.write("rich==15.0.0\n")
    make(clone, "demo", python)
    assert len(log.read_text("utf-8").splitlines()) == 2
    assert len(list((clone / ".venv").glob(".installed-*"))) == 1


def test_a_failed_installation_is_tried_again(clone: Path) -> None:
    python = "PYTHON=" + fake_python(clone, INSTALLER.replace('echo "$*" >> pip.log', 'echo "$*" >> pip.log; exit 1'))
    assert make(clone, "demo", python).returncode != 0
    assert make(clone, "demo", python).returncode != 0
    assert len((clone / "pip.log").read_text("utf-8").splitlines()) == 2


def test_ci_script_is_strict_and_parses() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "set -euo pipefail" in script.read_text("utf-8")
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_reference_runs_name_places_that_exist(clone: Path) -> None:
    """Some in the run of its own, some beside the heavy tests."""
    for target, kind in (("test-reference", Path.is_dir), ("test-heavy", Path.is_file)):
        planned = make(clone, "-n", target).stdout.splitlines()
        [command] = [line for line in planned if line.startswith("INFER_PLATFORM=reference ")]
        places = [ROOT / word for word in command.split() if word.startswith("tests/")]
        assert len(places) > 2 and all(map(kind, places)), command


def test_help_names_every_public_target(clone: Path) -> None:
    shown = make(clone, "help").stdout
    for target in ("demo", "test", "test-heavy", "test-reference", "status", "bench", "docs", "clean"):
        assert f"make {target} " in shown
