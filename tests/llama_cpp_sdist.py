"""Vocabulary-only GGUFs with their expected ids and published chat templates, from the sdist of llama-cpp-python.
Fetched by pip once into the test cache, unpacked, never built; a conftest imports the fixtures it wants."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path, PurePosixPath

import pytest
from filelock import FileLock

REQUIREMENT = "llama-cpp-python==0.3.36"
MEMBERS = "vendor/llama.cpp/models/"


@pytest.fixture(scope="session")
def llama_cpp_sdist(test_cache: Path) -> Path:
    """The directory with `ggml-vocab-*.gguf`, their `.inp` and `.out` files, and `templates/*.jinja`."""
    target = test_cache / "llama-cpp-models-0.3.36"
    with FileLock(test_cache / "llama-cpp-models.lock"):
        if not target.is_dir():
            scratch = test_cache / "llama-cpp-sdist"
            shutil.rmtree(scratch, ignore_errors=True)
            (scratch / "models").mkdir(parents=True)
            _download(scratch)
            _unpack(next(scratch.glob("*.tar.gz")), scratch / "models")
            (scratch / "models").rename(target)
            shutil.rmtree(scratch)
    return target


@pytest.fixture(scope="session")
def chat_templates(llama_cpp_sdist: Path) -> dict[str, str]:
    """Published templates by file name."""
    files = sorted((llama_cpp_sdist / "templates").glob("*.jinja"))
    return {file.stem: file.read_text(encoding="utf-8") for file in files}


def _download(directory: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-python"]
    done = subprocess.run(
        [*command, "--dest", str(directory), REQUIREMENT], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.fail(f"cannot fetch the tokenizer oracles {REQUIREMENT}: {done.stderr.strip() or done.stdout.strip()}")


def _unpack(archive: Path, target: Path) -> None:
    with tarfile.open(archive) as tar:
        for member in tar:
            _, _, name = member.name.partition(MEMBERS)
            if not name or not member.isfile() or ".." in PurePosixPath(name).parts:
                continue
            source = tar.extractfile(member)
            assert source is not None
            file = target / name
            file.parent.mkdir(parents=True, exist_ok=True)
            with source, file.open("wb") as sink:
                shutil.copyfileobj(source, sink)
