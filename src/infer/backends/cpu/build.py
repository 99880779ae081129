"""Builds the C++ kernels for this CPU when they are first needed, and keeps the library by content.

Called when a platform is created. Several processes may ask at once: one builds, the others wait for its file.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform as host
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from infer.backends.reference.memory import usable_cpus
from infer.errors import ConfigError
from infer.plugins.model_source import Progress, ProgressCallback

SOURCES = Path(__file__).parent / "csrc"
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-pthread", "-fno-math-errno", "-Wno-psabi")
FLAGS_OF = {"encode.cpp": ("-ffp-contract=off",)}
"""Those of one source; encode.cpp must round every product, as torch does."""
NATIVE = ("-march=native",)
COMPILERS = ("g++", "c++", "clang++")
TIMEOUT = 300.0
"""Seconds for one source; all take about 30 of one core."""
UNFINISHED = ".building-"
FORGOTTEN = 3600.0
"""Seconds after which nobody is still building."""


def find_compiler() -> str | None:
    """The first C++ compiler on the path."""
    return next((found for name in COMPILERS if (found := shutil.which(name))), None)


def build_library(cache_dir: Path, progress: ProgressCallback | None = None) -> Path:
    """The shared library for this machine, from the cache or built now, which `progress` is told first.

    Raises `ConfigError` with the compiler's words, or when there is no compiler or no place for the file.
    """
    compiler = find_compiler()
    if compiler is None:
        raise ConfigError(
            "the native CPU kernels need a C++ compiler (g++ or clang++) and none is on the path; install one, name "
            "prebuilt ones (platform.kernels) or set platform.name=reference",
            fields=("platform.name",),
        )
    library = cache_dir / "kernels" / f"infer-cpu-{_key(compiler)}.so"
    if library.is_file():
        return library
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with _alone_with(library):
            if not library.is_file():
                if progress is not None:
                    note = f"building the kernels for this CPU with {Path(compiler).name}, once: up to a minute"
                    progress(Progress("build", 0, None, unit="", detail=note))
                compile_library(compiler, NATIVE, library)
    except OSError as error:
        raise ConfigError(
            f"the native CPU kernels cannot be kept in {library.parent}: {error.strerror or error}; make room there, name "
            "another cache directory or set platform.name=reference",
            fields=("platform.name",),
        ) from error
    return library


def compile_library(compiler: str, target: Sequence[str], library: Path, directory: Path = SOURCES) -> None:
    """Compile all sources side by side with the flags of a `target`, and put the library in its place in one piece.

    Raises `ConfigError` with the compiler's words and `OSError`.
    """
    sources = sorted(directory.glob("*.cpp"))
    with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=library.parent) as name:
        objects = [Path(name) / f"{source.stem}.o" for source in sources]

        def compile_source(source: Path, made: Path) -> None:
            flags = (*FLAGS, *target, *FLAGS_OF.get(source.name, ()))
            _run([compiler, *flags, "-c", str(source), "-o", str(made)])

        with ThreadPoolExecutor(usable_cpus()) as pool:
            waiting = [pool.submit(compile_source, *pair) for pair in zip(sources, objects, strict=True)]
            try:
                for done in waiting:
                    done.result()
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)  # those that run end first: nobody writes afterwards
                raise
        made = Path(name) / library.name
        _run([compiler, "-shared", "-pthread", *map(str, objects), "-o", str(made)])
        made.chmod(0o755)
        made.replace(library)


def sources_digest() -> str:
    """Changes with the sources and the flags."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".cpp", ".h"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(repr((FLAGS, sorted(FLAGS_OF.items()))).encode())
    return digest.hexdigest()


def cpu_facts() -> dict[str, str]:
    """What /proc/cpuinfo says of the first CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {"model name": host.processor()}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}


def _key(compiler: str) -> str:
    """Changes with the sources, the flags, the compiler and the CPU."""
    facts = cpu_facts()  # what the instruction set of "native" follows from
    cpu = "|".join(facts.get(name, "") for name in ("flags", "Features", "model name", "CPU part"))
    digest = hashlib.sha256(sources_digest().encode())
    for fact in (*NATIVE, _version(compiler), host.machine(), cpu):
        digest.update(b"\0" + fact.encode())
    return digest.hexdigest()[:24]


def _version(compiler: str) -> str:
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=TIMEOUT, check=False)
    return done.stdout.partition("\n")[0]


@contextlib.contextmanager
def _alone_with(library: Path) -> Iterator[None]:
    """No other process builds the same library meanwhile, and what builds that were killed long ago have left is removed."""
    lock = library.with_suffix(".lock")
    place = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: at worst a build is done twice
            fcntl.flock(place, fcntl.LOCK_EX)
        for left in library.parent.glob(f"{UNFINISHED}*"):
            with contextlib.suppress(OSError):
                if time.time() - left.lstat().st_mtime > FORGOTTEN:
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
        yield
    finally:
        lock.unlink(missing_ok=True)  # who waits for it has it still, and looks for the library first
        os.close(place)


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        reason = f"it took more than {TIMEOUT:.0f} seconds"
    else:
        if not done.returncode:
            return
        reason = _gist(done.stderr) or f"exit status {done.returncode} without a word"
    raise ConfigError(
        f"{Path(command[0]).name} cannot build the native CPU kernels: {reason}; update the compiler, name prebuilt ones "
        "(platform.kernels) or set platform.name=reference",
        fields=("platform.name",),
    )


def _gist(stderr: str) -> str:
    """The first line that says "error", without the directories, and how many more there are; or the last line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\berror\b", line)]
    if not errors:
        return lines[-1][:300] if lines else ""
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return errors[0].replace(f"{SOURCES}{os.sep}", "")[:300] + more
