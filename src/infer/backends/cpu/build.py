"""Builds the C++ kernels for this CPU when they are first needed, and keeps the library by content.

Called when a platform is created. Several processes may build at once: the finished file appears in one piece.
"""

from __future__ import annotations

import hashlib
import os
import platform as host
import shutil
import subprocess
import tempfile
from pathlib import Path

from infer.errors import ConfigError
from infer.plugins.model_source import Progress, ProgressCallback

SOURCES = Path(__file__).parent / "csrc"
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-pthread", "-fno-math-errno", "-Wno-psabi")
COMPILERS = ("g++", "c++", "clang++")
TIMEOUT = 300.0
"""Seconds; a build takes about 30."""


def find_compiler() -> str | None:
    """The first C++ compiler on the path."""
    return next((found for name in COMPILERS if (found := shutil.which(name))), None)


def build_library(cache_dir: Path, progress: ProgressCallback | None = None) -> Path:
    """The shared library for this machine, from the cache or built now, which `progress` is told first.

    Raises `ConfigError` with the compiler's words.
    """
    compiler = find_compiler()
    if compiler is None:
        raise ConfigError(
            "the native CPU kernels need a C++ compiler (g++ or clang++) and none is on the path; install one or set "
            "platform.name=reference",
            fields=("platform.name",),
        )
    library = cache_dir / "kernels" / f"infer-cpu-{_key(compiler)}.so"
    if not library.is_file():
        library.parent.mkdir(parents=True, exist_ok=True)
        if progress is not None:
            note = f"building the kernels for this CPU with {Path(compiler).name}, once: up to a minute"
            progress(Progress("build", 0, None, unit="", detail=note))
        _compile(compiler, library)
    return library


def _key(compiler: str) -> str:
    """Changes with the sources, the flags, the compiler and the CPU."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".cpp", ".h"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    for fact in (*FLAGS, _version(compiler), host.machine(), _cpu_flags()):
        digest.update(fact.encode() + b"\0")
    return digest.hexdigest()[:24]


def _version(compiler: str) -> str:
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=TIMEOUT, check=False)
    return done.stdout.partition("\n")[0]


def _cpu_flags() -> str:
    """What the instruction set of "native" follows from."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return host.processor()
    wanted = ("flags", "Features", "model name", "CPU part")
    first = {name.strip(): value for name, _, value in (line.partition(":") for line in reversed(lines))}
    return "|".join(first.get(name, "") for name in wanted)


def _compile(compiler: str, library: Path) -> None:
    sources = [str(path) for path in sorted(SOURCES.glob("*.cpp"))]
    handle, name = tempfile.mkstemp(suffix=".so", prefix=".building-", dir=library.parent)
    os.close(handle)
    made = Path(name)
    try:
        command = [compiler, *FLAGS, *sources, "-o", name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
        if done.returncode:
            raise ConfigError(
                f"{Path(compiler).name} cannot build the native CPU kernels: {_gist(done.stderr)}; update the compiler or "
                "set platform.name=reference",
                fields=("platform.name",),
            )
        made.chmod(0o755)
        made.replace(library)  # whoever comes second replaces a file with an equal one
    finally:
        made.unlink(missing_ok=True)


def _gist(stderr: str) -> str:
    """The first line that says "error", or the last line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[-1] if lines else "no message")[:300]
