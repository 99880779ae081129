"""The kernels are built once, and who waits for it is told why."""

from __future__ import annotations

from pathlib import Path

import pytest

from infer.backends.cpu import build
from infer.errors import ConfigError
from infer.plugins.model_source import Progress


def compiler(folder: Path, script: str) -> None:
    """A C++ compiler that takes no seconds: `script` is what it does when it is asked for more than its version."""
    tool = folder / "g++"
    tool.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo "g++ 1"; exit; fi\n{script}\n')
    tool.chmod(0o755)


def test_a_build_is_announced_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(tmp_path, 'for last; do :; done; echo library > "$last"')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    told: list[Progress] = []
    library = build.build_library(tmp_path / "cache", told.append)
    assert library.read_text() == "library\n"
    (report,) = told
    assert report.stage == "build" and report.unit == ""
    assert report.detail == "building the kernels for this CPU with g++, once: up to a minute"
    assert build.build_library(tmp_path / "cache", told.append) == library
    assert told == [report], "what is built already is taken in silence"


def test_a_compiler_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(tmp_path, 'echo "x.cpp:1: error: no such thing" >&2; exit 1')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(ConfigError, match=r"error: no such thing; update the compiler or set platform\.name=reference"):
        build.build_library(tmp_path / "cache")
    assert not list((tmp_path / "cache" / "kernels").iterdir())
