"""The name and version of the package for a source tree that is not installed: plugins are told apart by distributions.

Runs in the parent before a part begins; owns a directory that the caller removes.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
import tomllib
from pathlib import Path

DISTRIBUTION = "infer-engine"


def installed() -> bool:
    """Whether Python knows the distribution already."""
    try:
        importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def stand_in(root: Path, directory: Path) -> None:
    """Put metadata of the source tree below `root` into `directory`, and that on the path of this process and of its children."""
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    version = project["version"]
    info = directory / f"{DISTRIBUTION.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: {version}\n", "utf-8")
    sys.path.insert(0, str(directory))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(directory), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    importlib.invalidate_caches()
