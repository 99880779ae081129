"""The kernels are built once, side by side, and who waits for it or meets a broken compiler is told why."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from infer.backends.cpu import build
from infer.errors import ConfigError
from infer.plugins.model_source import Progress

WRITES = 'while [ "$1" != -o ]; do shift; done; echo made > "$2"'


def compiler(folder: Path, script: str) -> None:
    """A C++ compiler that takes no seconds: `script` is what it does when it is asked for more than its version."""
    tool = folder / "g++"
    tool.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo "g++ 1"; exit; fi\n{script}\n')
    tool.chmod(0o755)


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


def test_a_build_is_announced_once(tmp_path: Path) -> None:
    compiler(tmp_path, WRITES)
    told: list[Progress] = []
    library = build.build_library(tmp_path / "cache", told.append)
    assert library.read_text() == "made\n"
    (report,) = told
    assert report.stage == "build" and report.unit == ""
    assert report.detail == "building the kernels for this CPU with g++, once: up to a minute"
    assert build.build_library(tmp_path / "cache", told.append) == library
    assert told == [report], "what is built already is taken in silence"
    assert list(library.parent.iterdir()) == [library]


def test_every_source_is_compiled_by_itself_with_its_flags(tmp_path: Path) -> None:
    compiler(tmp_path, f'echo "$@" >> {tmp_path}/calls; {WRITES}')
    build.build_library(tmp_path / "cache")
    calls = (tmp_path / "calls").read_text().splitlines()
    sources = {path.name for path in build.SOURCES.glob("*.cpp")}
    compiled = {name: call for call in calls for name in sources if f"/{name} " in call}
    assert compiled.keys() == sources and len(calls) == len(sources) + 1
    assert all("-march=native" in call and "-c" in call for call in compiled.values())
    assert [name for name, call in compiled.items() if "-ffp-contract=off" in call] == ["encode.cpp"]
    assert calls[-1].startswith("-shared"), "linked when all are there"


def test_who_asks_meanwhile_waits_for_the_one_build(tmp_path: Path) -> None:
    compiler(tmp_path, f"echo x >> {tmp_path}/calls; sleep 0.05; {WRITES}")
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(build.build_library(tmp_path / "cache"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 4 and len(set(found)) == 1
    count = len(list(build.SOURCES.glob("*.cpp"))) + 1
    assert (tmp_path / "calls").read_text().count("x") == count


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (
            'echo "x.cpp:1: error: no such thing" >&2; exit 1',
            r"g\+\+ cannot build .*: x\.cpp:1: error: no such thing; ",
        ),
        ('echo "a:1: error: one\nb:2: error: two" >&2; exit 1', r"a:1: error: one \(and 1 more\); "),
        ("exit 3", "exit status 3 without a word"),
        ('printf "\\377 error: odd bytes" >&2; exit 1', "error: odd bytes"),
    ],
)
def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(tmp_path: Path, script: str, words: str) -> None:
    compiler(tmp_path, script)
    with pytest.raises(ConfigError, match=words) as caught:
        build.build_library(tmp_path / "cache")
    assert "update the compiler" in str(caught.value) and caught.value.fields == ("platform.name",)
    assert not list((tmp_path / "cache" / "kernels").iterdir())


def test_what_a_killed_build_has_left_is_removed(tmp_path: Path) -> None:
    compiler(tmp_path, WRITES)
    old, present = (tmp_path / "cache" / "kernels" / f"{build.UNFINISHED}{name}" for name in ("old", "present"))
    for left in (old, present):
        left.mkdir(parents=True)
        (left / "half.o").write_text("half")
    os.utime(old, (0, 0))
    library = build.build_library(tmp_path / "cache")
    assert sorted(library.parent.iterdir()) == sorted([library, present]), "somebody may be building there"


def test_another_library_is_not_waited_for(tmp_path: Path) -> None:
    compiler(tmp_path, WRITES)
    with build._alone_with(tmp_path / "other.so"):
        (tmp_path / "cache" / "kernels").mkdir(parents=True)
        with build._alone_with(tmp_path / "cache" / "kernels" / "infer-cpu-0.so"):
            assert build.build_library(tmp_path / "cache").is_file()


def test_no_place_for_the_library_is_said(tmp_path: Path) -> None:
    compiler(tmp_path, WRITES)
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ConfigError, match=r"cannot be kept in .*cache/kernels: Not a directory"):
        build.build_library(tmp_path / "cache")
