"""Installs distributions from their source trees into a directory, as pip would, and runs code there in a new process.

Used by the tests of this directory; owns nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
BROKEN = HERE / "dists"
EXAMPLES = HERE.parents[1] / "examples" / "plugins"
HELLO = EXAMPLES / "hello"


def install(source: Path, site: Path) -> None:
    """Copy the modules and write the metadata that `importlib.metadata` reads: name, version, entry points."""
    project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    points = "\n".join(f"{name} = {value}" for name, value in project["entry-points"]["infer"].items())
    (info / "entry_points.txt").write_text(f"[infer]\n{points}\n")
    for module in source.glob("*.py"):
        shutil.copy(module, site)


def python(code: str, site: Path, *arguments: str) -> str:
    """Standard output of a fresh interpreter that sees `site`; standard error is in the failure message."""
    path = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]  # which may say whose infer is tested
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
