"""Libraries built beforehand for machines without a compiler: one per level of the instruction set, chosen by the CPU at hand.

`infer kernels build` makes them; a platform that opens takes one. Blocking; owns nothing.
"""

from __future__ import annotations

import logging
import platform as host
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from infer.backends.cpu.build import build_library, compile_library, cpu_facts, find_compiler, sources_digest
from infer.errors import ConfigError
from infer.plugins.model_source import Progress, ProgressCallback

logger = logging.getLogger(__name__)

PACKAGED = Path(__file__).parent / "prebuilt"
"""Where a wheel may carry libraries: `infer kernels build --out` this directory before the wheel is made."""


@dataclass(frozen=True, slots=True)
class Level:
    """An instruction set that libraries are built for."""

    name: str
    machine: str
    needs: frozenset[str]
    """Flags of /proc/cpuinfo."""
    target: tuple[str, ...]
    """Flags of the compiler."""


_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
LEVELS = (
    Level(
        "x86-64-v4-bf16",
        "x86_64",
        _AVX512 | {"avx512_vnni", "avx512_bf16"},
        ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"),
    ),
    Level("x86-64-v4-vnni", "x86_64", _AVX512 | {"avx512_vnni"}, ("-march=x86-64-v4", "-mavx512vnni")),
    Level("x86-64-v4", "x86_64", _AVX512, ("-march=x86-64-v4",)),
    Level("x86-64-v3", "x86_64", _AVX2, ("-march=x86-64-v3",)),
    Level("aarch64", "aarch64", frozenset(), ("-march=armv8-a",)),
)
"""The best first."""


def kernel_library(cache_dir: Path, directory: Path | None, progress: ProgressCallback | None = None) -> Path:
    """The library to load, with a line in the log that says which and why.

    A `directory` that is named is where it comes from. Otherwise it is built for this CPU; where that cannot be, one that
    came with the package is taken. Raises `ConfigError` when there is none.
    """
    if directory is not None:
        library, level = _named(directory)
        logger.info("native kernels: prebuilt for %s, %s", level.name, library)
        return library
    try:
        library = build_library(cache_dir, progress)
    except ConfigError as error:
        found = find_prebuilt(PACKAGED)
        if found is None:
            raise
        library, level = found
        logger.warning("native kernels: prebuilt for %s, %s, not built for this CPU: %s", level.name, library, error)
        return library
    logger.info("native kernels: built for this CPU, %s", library)
    return library


def find_prebuilt(directory: Path) -> tuple[Path, Level] | None:
    """The best library in a directory that runs on this CPU and belongs to this version of the sources."""
    digest = sources_digest()
    for level in _levels_here():
        library = directory / _file_name(level, digest)
        if library.is_file():
            return library, level
    return None


def build_prebuilt(directory: Path, levels: Sequence[str] = (), progress: ProgressCallback | None = None) -> list[Path]:
    """Build a library for each named level, or all of this machine's architecture, into a directory -> the files.

    Raises `ConfigError` for an unknown level, without a compiler and with the compiler's words.
    """
    known = {level.name: level for level in LEVELS if level.machine == host.machine()}
    unknown = [name for name in levels if name not in known]
    if unknown or not known:
        raise ConfigError(
            f"kernels for {unknown[0] if unknown else host.machine()!r} cannot be built on {host.machine()}; "
            f"levels here are {', '.join(known) or 'none'}"
        )
    compiler = find_compiler()
    if compiler is None:
        raise ConfigError("a C++ compiler (g++ or clang++) is needed to build kernels, and none is on the path")
    chosen, digest = [known[name] for name in levels or known], sources_digest()
    made = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for number, level in enumerate(chosen):
            if progress is not None:
                progress(Progress("build", number, len(chosen), unit="", detail=level.name))
            made.append(directory / _file_name(level, digest))
            compile_library(compiler, level.target, made[-1])
    except OSError as error:
        raise ConfigError(f"cannot write kernels to {directory}: {error.strerror or error}") from error
    return made


def _named(directory: Path) -> tuple[Path, Level]:
    found = find_prebuilt(directory)
    if found is not None:
        return found
    files = sorted(path.name for path in directory.glob("infer-cpu-*.so")) if directory.is_dir() else []
    holds = f"holds {', '.join(files[:4])}" if files else "holds no kernels"
    wanted = [_file_name(level, sources_digest()) for level in _levels_here()]
    raise ConfigError(
        f"platform.kernels={directory} {holds}; this CPU and this version of infer need one of "
        f"{', '.join(wanted) or 'no level that is known'}: run `infer kernels build --out {directory}` where there is a "
        "compiler, or leave the setting out",
        fields=("platform.kernels",),
    )


def _levels_here() -> list[Level]:
    facts = cpu_facts()
    flags = set(facts.get("flags", facts.get("Features", "")).split())
    return [level for level in LEVELS if level.machine == host.machine() and level.needs <= flags]


def _file_name(level: Level, digest: str) -> str:
    return f"infer-cpu-{level.name}-{digest[:16]}.so"
