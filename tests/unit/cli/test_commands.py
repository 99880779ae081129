"""The other commands, and what importing the command line costs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from infer.plugins.model_cache import Filled, fetch


def test_version_and_help(infer: Any) -> None:
    done = infer("--version")
    assert done.code == 0 and done.out.startswith("infer 0.")
    for arguments in (["--help"], ["run", "--help"], ["chat", "--help"], ["pull", "--help"], ["plugins", "--help"]):
        done = infer(*arguments)
        assert done.code == 0 and "Usage: infer" in done.out
    assert "(default: 16)" in infer("run", "--help").out


def test_no_command_shows_the_help(infer: Any) -> None:
    done = infer()
    assert "Commands" in done.out and done.err == ""


@pytest.fixture
def cached(tmp_path: Path) -> Path:
    for key, reference in (("pypi:a", "pypi:a-b==1"), ("hf:org/m@main", "hf:org/m@abc")):

        def fill(content: Path, reference: str = reference) -> Filled:
            (content / "m.gguf").write_bytes(b"x" * 2048)
            return Filled(reference=reference, identity="sha256:1", model=content / "m.gguf")

        fetch(tmp_path / "cache", key, fill, lambda _: None)
    return tmp_path / "cache"


def test_pull_list(infer: Any, cached: Path) -> None:
    done = infer("pull", "--list")
    assert done.code == 0 and "pypi:a-b==1" in done.out and "2.0 KiB" in done.out
    rows = json.loads(infer("pull", "--list", "--json").out)
    assert [row["reference"] for row in rows] == ["pypi:a-b==1", "hf:org/m@abc"]
    assert all(Path(row["path"]).is_file() and row["bytes"] == 2048 for row in rows)


@pytest.mark.parametrize("name", ["pypi:a-b==1", "pypi:A_b", "hf:org/m", "org/m", "hf:org/m@main", "hf:org/m@abc"])
def test_pull_remove(infer: Any, cached: Path, name: str) -> None:
    done = infer("pull", "--remove", name)
    assert done.code == 0 and "removed" in done.err
    assert len(json.loads(infer("pull", "--list", "--json").out)) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--remove", "pypi:a"], "pypi:a is not in the cache"),
        (["--remove", "pypi:a-b==2"], "not in the cache"),
        (["--remove"], "needs the model to remove"),
        (["no-such-model"], "neither an existing path nor org/name"),
    ],
)
def test_pull_mistakes(infer: Any, cached: Path, arguments: list[str], said: str) -> None:
    done = infer("pull", *arguments)
    assert done.code == 1 and said in done.err
    assert len(json.loads(infer("pull", "--list", "--json").out)) == 2


def test_pull_prints_the_path(infer: Any, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    done = infer("pull", str(tmp_path / "m.gguf"))
    assert (done.code, done.out) == (0, f"{tmp_path / 'm.gguf'}\n")
    assert "local:" in done.err


def test_pull_of_an_empty_cache(infer: Any, tmp_path: Path) -> None:
    assert "holds no model yet" in infer("pull", "--list").err
    assert infer("pull", "--list", "--json").out == "[]\n"


@pytest.mark.row("ENG-PLUGIN-SYSTEM", "infer plugins shows name, kind, distribution, version, api, chosen or why not")
def test_plugins(infer: Any) -> None:
    done = infer("plugins")
    assert done.code == 0
    header, *rows = [line.split() for line in done.out.splitlines()]
    assert header == ["kind", "name", "distribution", "version", "api", "state"]
    found = {tuple(row[:3]) for row in rows}
    for name in ("local", "hub", "pypi", "fsspec"):
        assert ("model_source", name, "infer-engine") in found
    entries = json.loads(infer("plugins", "--json").out)
    assert len(entries) == len(rows)
    assert {"kind", "name", "distribution", "version", "api", "state", "reason"} == set(entries[0])


def test_quotes_are_advised_only_where_a_text_is_taken(infer: Any) -> None:
    done = infer("run", "model", "two", "words")
    assert done.code == 2 and "in quotes" in done.err
    done = infer("verify", "artifact", "second")
    assert done.code == 2 and "(second); see" in done.err and "quotes" not in done.err


def test_plugins_of_an_unknown_distribution(infer: Any) -> None:
    done = infer("plugins", "--plugins.allow", "no-such-distribution")
    assert done.code == 1 and "no-such-distribution" in done.err


@pytest.mark.row("X-IMPORT", "importing the command line imports no torch")
def test_importing_the_command_line_is_light() -> None:
    program = (
        "import sys, infer.cli.app, infer.__main__; "
        "print([m for m in ('torch', 'numpy', 'huggingface_hub', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_installed_command_ends_with_the_code_of_the_failure(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "infer", "pull", "--remove", "org/none"]
    done = subprocess.run(command, capture_output=True, text=True, env={"INFER_CACHE_DIR": str(tmp_path)}, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("infer: error: org/none is not in the cache")


def test_a_reader_that_leaves_is_not_a_traceback(tmp_path: Path) -> None:
    script = f"{sys.executable} -m infer run --help | head -1"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
