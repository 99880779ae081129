"""Model source: a directory or .gguf file behind any fsspec URL (s3://, gs://, https://, memory://, file://).

Runs on a worker thread, on fsspec's synchronous side. Remote files are copied into the cache, local ones used in place.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]

from infer.errors import ModelError
from infer.plugins.hookspecs import hookimpl
from infer.plugins.model_cache import Filled, fetch, find_entry
from infer.plugins.model_files import find_model, fingerprint, safe_target, select_files
from infer.plugins.model_source import API_VERSION, ModelSourceSpec, Progress, ProgressCallback, ResolvedModel

_CHUNK = 1 << 22
_LOCAL = ("file", "local")
_NO_NETWORK = (*_LOCAL, "memory")


class FsspecSource:
    """Answers for every reference with "://"."""

    def __init__(self, cache_dir: Path, offline: bool) -> None:
        self._cache_dir = cache_dir
        self._offline = offline

    def matches(self, reference: str) -> bool:
        return "://" in reference

    def resolve(self, reference: str, progress: ProgressCallback) -> ResolvedModel:
        protocol = reference.partition("://")[0]
        key = f"url:{reference.rstrip('/')}"
        if protocol in _LOCAL:
            return _in_place(reference)
        entry = find_entry(self._cache_dir, key)
        if entry is None:
            if self._offline and protocol not in _NO_NETWORK:
                raise ModelError(
                    f"{reference} is not in the cache {self._cache_dir} and offline mode is on: "
                    f"unset INFER_OFFLINE and HF_HUB_OFFLINE, or run `infer pull {reference}` where there is a network"
                )
            entry = fetch(self._cache_dir, key, lambda content: _fill(content, reference, progress), progress)
        return entry.resolved(reference)


def _in_place(reference: str) -> ResolvedModel:
    path = Path(fsspec.core.url_to_fs(reference)[1])
    if not path.exists():
        raise ModelError(f"{reference}: no such file or directory")
    model = find_model(path, reference)
    return ResolvedModel(path=model, reference=reference, identity=fingerprint(model))


def _fill(content: Path, reference: str, progress: ProgressCallback) -> Filled:
    try:
        filesystem, root = fsspec.core.url_to_fs(reference)
        sources = _listing(filesystem, root, reference)
        total = sum(size for _, size in sources.values())
        free = shutil.disk_usage(content).free
        if total > free:
            raise ModelError(f"{reference} is {total} bytes and {content} has {free} free: make room")
        digest, done = hashlib.sha256(), 0
        for name in sorted(sources):
            remote, size = sources[name]
            target = safe_target(content, name, reference)
            target.parent.mkdir(parents=True, exist_ok=True)
            digest.update(f"{name}\0{size}\0".encode())
            start = done
            with filesystem.open(remote, "rb") as source, target.open("xb") as sink:
                while chunk := source.read(_CHUNK):
                    sink.write(chunk)
                    digest.update(chunk)
                    done += len(chunk)
                    progress(Progress("download", done, total or None, "B", name))
            if size and done - start != size:
                raise ModelError(f"{reference}: {name} is {size} bytes and {done - start} arrived; pull it again")
    except ModelError:
        raise
    except ImportError as error:
        raise ModelError(
            f"{reference} needs another package ({error}); s3:// comes with `pip install infer-engine[s3]`"
        ) from error
    except FileNotFoundError as error:
        raise ModelError(f"{reference} does not exist ({error})") from error
    except ValueError as error:
        raise ModelError(f"{reference} cannot be opened: {error}") from error
    except Exception as error:  # every filesystem has exceptions of its own
        raise ModelError(
            f"{reference} cannot be read ({type(error).__name__}: {error}); check the URL, credentials and network"
        ) from error
    identity = f"sha256:{digest.hexdigest()}"
    progress(Progress("verify", 1, 1, "", f"{reference} {identity}"))
    return Filled(reference=reference.rstrip("/"), identity=identity, model=find_model(content, reference))


def _listing(filesystem: Any, root: str, reference: str) -> dict[str, tuple[str, int]]:
    """Relative name -> (remote path, size) of the files to copy."""
    if root.lower().endswith(".gguf") or not filesystem.isdir(root):
        facts = filesystem.info(root)
        name = root.rstrip("/").rpartition("/")[2].partition("?")[0]
        if not name.lower().endswith(".gguf"):
            raise ModelError(f"{reference} is a file that does not end in .gguf; name a directory or a .gguf")
        return {name: (root, int(facts.get("size") or 0))}
    base = root.rstrip("/")
    details: dict[str, dict[str, Any]] = filesystem.find(base, detail=True)
    names = {path[len(base) :].lstrip("/"): path for path in details}
    return {name: (names[name], int(details[names[name]].get("size") or 0)) for name in select_files(names, reference)}


def create(cache_dir: Path, offline: bool, token: str | None) -> FsspecSource:
    return FsspecSource(cache_dir, offline)


@hookimpl
def infer_model_sources() -> list[ModelSourceSpec]:
    return [
        ModelSourceSpec(
            name="fsspec", api=API_VERSION, factory="infer.sources.fsspec_url:create", schemes=("*",), example={}
        )
    ]
