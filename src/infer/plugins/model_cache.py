"""The cache of fetched models: one directory per entry, filled by one process at a time, visible only when complete.

Used by model sources on a worker thread and by `infer pull`. Owns `<cache>/models`, `<cache>/staging`, `<cache>/locks`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from infer.errors import ModelError
from infer.plugins.model_source import Progress, ProgressCallback, ResolvedModel

ENTRY = "entry.json"
CONTENT = "content"
_POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """A complete model in the cache."""

    key: str
    reference: str
    identity: str
    path: Path
    """Checkpoint directory or .gguf file."""
    size: int
    """Bytes on disk."""

    def resolved(self, reference: str) -> ResolvedModel:
        return ResolvedModel(path=self.path, reference=reference, identity=self.identity)


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """What a source reports when it has filled the content directory."""

    reference: str
    """The most exact reference of what was fetched, such as package==version."""
    identity: str
    model: Path
    """Checkpoint directory or .gguf file, inside the content directory."""


def find_entry(cache_dir: Path, key: str) -> CacheEntry | None:
    """The entry when it is there and no file of it is missing or cut short."""
    root = cache_dir / "models" / _slug(key)
    try:
        record = json.loads((root / ENTRY).read_text("utf-8"))
        content = root / CONTENT
        sizes: dict[str, int] = record["files"]
        if any((content / name).stat().st_size != size for name, size in sizes.items()):
            return None
        return CacheEntry(
            key=record["key"],
            reference=record["reference"],
            identity=record["identity"],
            path=content / record["model"],
            size=sum(sizes.values()),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def list_entries(cache_dir: Path) -> list[CacheEntry]:
    """Every complete entry, newest last."""
    records = sorted((cache_dir / "models").glob(f"*/{ENTRY}"), key=lambda path: path.stat().st_mtime)
    found = (find_entry(cache_dir, key) for key in (_key_of(path) for path in records) if key is not None)
    return [entry for entry in found if entry is not None]


def remove_entry(cache_dir: Path, key: str) -> None:
    """Take an entry away, at once for everyone who looks it up; waits while another process fills it."""
    with _locked(cache_dir, key, lambda _: None):
        root = cache_dir / "models" / _slug(key)
        grave = cache_dir / "staging" / f"{_slug(key)}.removed"
        shutil.rmtree(grave, ignore_errors=True)
        grave.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            root.rename(grave)
        shutil.rmtree(grave, ignore_errors=True)
        shutil.rmtree(cache_dir / "staging" / _slug(key), ignore_errors=True)


def fetch(
    cache_dir: Path,
    key: str,
    fill: Callable[[Path], Filled],
    progress: ProgressCallback,
    *,
    keep_partial: bool = False,
) -> CacheEntry:
    """The entry of `key`, filled by `fill(content_directory)` if it is not there yet.

    One process fills, others wait. The entry appears by one rename; a failed or killed `fill` leaves none. With
    `keep_partial` a later attempt finds the files of the broken one and may resume; else it starts from nothing.
    """
    entry = find_entry(cache_dir, key)
    if entry is not None:
        return entry
    try:
        with _locked(cache_dir, key, progress):
            entry = find_entry(cache_dir, key)  # another process may have filled it while this one waited
            return entry if entry is not None else _fill(cache_dir, key, fill, keep_partial)
    except OSError as error:
        raise ModelError(
            f"cannot write the model cache {cache_dir}: {error}; set INFER_CACHE_DIR to a directory with room that you own"
        ) from error


def _fill(cache_dir: Path, key: str, fill: Callable[[Path], Filled], keep_partial: bool) -> CacheEntry:
    staging, root = cache_dir / "staging" / _slug(key), cache_dir / "models" / _slug(key)
    if not keep_partial:
        shutil.rmtree(staging, ignore_errors=True)
    content = staging / CONTENT
    content.mkdir(parents=True, exist_ok=True)
    try:
        filled = fill(content)
    except BaseException:
        if not keep_partial:
            shutil.rmtree(staging, ignore_errors=True)
        raise
    files = {
        str(path.relative_to(content)): path.stat().st_size for path in sorted(content.rglob("*")) if path.is_file()
    }
    record = {
        "key": key,
        "reference": filled.reference,
        "identity": filled.identity,
        "model": str(filled.model.relative_to(content)),
        "files": files,
    }
    with (staging / ENTRY).open("w", encoding="utf-8") as stream:
        json.dump(record, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    shutil.rmtree(root, ignore_errors=True)  # an entry that `find_entry` did not accept
    root.parent.mkdir(parents=True, exist_ok=True)
    staging.rename(root)
    entry = find_entry(cache_dir, key)
    if entry is None:
        raise ModelError(f"the model cache entry {root} was changed while it was written; pull the model again")
    return entry


@contextlib.contextmanager
def _locked(cache_dir: Path, key: str, progress: ProgressCallback) -> Iterator[None]:
    """An advisory lock that the kernel drops when the process dies. Lock files stay: removing one would race."""
    path = cache_dir / "locks" / f"{_slug(key)}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as stream:
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:  # said again and again: telling is where a stop is noticed
                progress(Progress("wait", 0, None, "", f"another process is fetching {key}"))
                time.sleep(_POLL_SECONDS)
        yield


@contextlib.contextmanager
def watch_size(
    directories: tuple[Path, ...],
    total: Callable[[], int | None],
    detail: str,
    progress: ProgressCallback,
    stop: Callable[[], None],
) -> Iterator[None]:
    """Report the bytes below `directories` as download progress while the block runs, from a thread of its own.

    When `progress` raises (the engine was closed meanwhile), `stop` is called to end the block's work, and the error
    is raised from the block.
    """
    done = threading.Event()
    failures: list[BaseException] = []

    def report() -> None:
        while not done.wait(_POLL_SECONDS):
            size = sum(_size_below(directory) for directory in directories)
            whole = total()
            try:
                progress(Progress("download", size if whole is None else min(size, whole), whole, "B", detail))
            except BaseException as error:
                failures.append(error)
                stop()
                return

    thread = threading.Thread(target=report, name="infer-download-progress", daemon=True)
    thread.start()
    try:
        yield
    except Exception:
        if not failures:  # else the block failed because it was stopped
            raise
    finally:
        done.set()
        thread.join()
    if failures:
        raise failures[0]


def hash_file(path: Path, progress: ProgressCallback | None = None) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 22):
            digest.update(chunk)
            done += len(chunk)
            if progress is not None:
                progress(Progress("verify", done, total, "B", path.name))
    return digest.hexdigest()


def _size_below(directory: Path) -> int:
    size = 0
    for root, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):  # files come and go while a download runs
                size += (Path(root) / name).stat().st_size
    return size


def _slug(key: str) -> str:
    """A file name that people can read; the digest keeps different keys apart."""
    readable = re.sub(r"[^A-Za-z0-9.=@_-]+", "--", key)[:80].strip(".-")
    return f"{readable}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def _key_of(record: Path) -> str | None:
    try:
        key = json.loads(record.read_text("utf-8"))["key"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return key if isinstance(key, str) else None
