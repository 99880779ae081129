"""Plants installed distributions in a temporary directory on sys.path, in this process."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Plant = Callable[..., None]


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plant]:
    """`plant("dist-name", "source of its one module", version="1.0")`; the module is called after the distribution."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    modules: list[str] = []

    def install(name: str, source: str, *, version: str = "1.0", entry: str = "main") -> None:
        module = f"planted_{name.replace('-', '_')}"
        modules.append(module)
        (site / f"{module}.py").write_text(textwrap.dedent(source))
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[infer]\n{entry} = {module}\n")

    yield install
    for module in modules:
        sys.modules.pop(module, None)
