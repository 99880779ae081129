"""What a run needs beside Python, said before anything of it is imported. Runs in the parent process; imports nothing heavy."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

PACKAGES = {
    "torch": "a CUDA build, 2.11 or newer",
    "triton": "3.6 or newer; a CUDA build of torch brings it",
    "numpy": "2 or newer",
    "safetensors": "reads the random checkpoints",
    "pydantic": "2.14 or newer",
    "anyio": "4.16 or newer",
    "fsspec": "2026.9 or newer",
    "llguidance": "1.9 or newer; an engine names its grammar backend when it starts",
    "msgspec": "0.22 or newer",
    "pluggy": "1.6 or newer",
    "zstandard": "0.25 or newer",
}
"""By import name, as the distribution is called too. Of these torch and triton alone know the GPU."""


def missing(names: Iterable[str] = PACKAGES) -> list[str]:
    """The packages that cannot be imported here."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def complaint(names: list[str]) -> str:
    """What to do about it, in words."""
    lines = [f"  {name} ({PACKAGES[name]})" for name in names]
    install = f"python -m pip install {' '.join(names)}"
    return "\n".join(
        ["tests/gpu/run.sh needs packages that this Python does not have:", *lines, f"Install them: {install}"]
    )
