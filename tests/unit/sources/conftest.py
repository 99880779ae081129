"""Small models on disk, in wheels and on a loopback hub; nothing here leaves the machine."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from infer.plugins.model_source import Progress

MakeWheel = Callable[..., Path]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A directory that looks like a safetensors checkpoint (sources do not read weights)."""
    root = tmp_path / "checkpoint"
    root.mkdir()
    (root / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (root / "tokenizer.json").write_text("{}")
    (root / "model.safetensors").write_bytes(b"w" * 5000)
    return root


@pytest.fixture
def seen() -> list[Progress]:
    return []


@pytest.fixture
def make_wheel(tmp_path: Path) -> MakeWheel:
    """make_wheel("name", "1.0", {"path": b"content"}) -> a valid wheel that holds these files."""

    def make(name: str, version: str, files: dict[str, bytes], directory: Path | None = None) -> Path:
        directory = directory or tmp_path / "wheels"
        directory.mkdir(exist_ok=True)
        module = name.replace("-", "_")
        info = f"{module}-{version}.dist-info"
        wheel = directory / f"{module}-{version}-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            for path, content in files.items():
                archive.writestr(path, content)
            archive.writestr(
                f"{info}/METADATA",
                f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: no-such-dep\n",
            )
            archive.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            archive.writestr(f"{info}/RECORD", "")
        return wheel

    return make
