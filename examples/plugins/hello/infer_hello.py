"""A plugin in one file: an alias for the default model, and a storage target that writes and logs local files.

`hello:default` resolves on a worker thread; the target runs in a delivery task. Owns nothing after `aclose`.
"""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path
from typing import Any

from anyio import to_thread

from infer import EngineConfig, ModelError, StorageError, StorageNotFoundError
from infer.plugins import (
    ModelSource,
    ModelSourceSpec,
    ProgressCallback,
    ResolvedModel,
    StorageTargetSpec,
    build_registry,
    hookimpl,
)

logger = logging.getLogger("infer_hello")


class AliasSource:
    """Answers for `hello:` references with the model that the alias stands for."""

    def __init__(self, cache_dir: Path, offline: bool, token: str | None) -> None:
        self._options = (cache_dir, offline, token)

    def matches(self, reference: str) -> bool:
        return reference.startswith("hello:")

    def resolve(self, reference: str, progress: ProgressCallback) -> ResolvedModel:
        config = EngineConfig(plugins={"allow": ()})  # the built-in sources only: never ourselves again
        if reference != "hello:default":
            raise ModelError(f"{reference!r} is not an alias of infer-hello; the one it knows is 'hello:default'")
        registry = build_registry(config.plugins)
        for spec in registry.specs("model_source"):
            source: ModelSource = registry.create("model_source", spec.name, *self._options)
            if source.matches(config.model.ref):
                return source.resolve(config.model.ref, progress)
        raise ModelError(f"no built-in model source answers for the default model {config.model.ref!r}")


class LogTarget:
    """One object at one local path, e.g. `hello-log:/tmp/artifacts/a.bin`."""

    def __init__(self, uri: str, options: dict[str, Any]) -> None:
        path = uri.removeprefix("hello-log:")
        if path == uri or not Path(path).is_absolute():
            raise StorageError(f"{uri!r} is not of the form hello-log:/absolute/path")
        self._path = Path(path)
        self._level = logging.getLevelName(options.get("level", "INFO"))

    async def put(self, data: bytes, *, if_absent: bool) -> None:
        await to_thread.run_sync(self._write, data, if_absent)
        logger.log(self._level, "stored %d bytes at %s", len(data), self._path)

    async def get(self, start: int = 0, end: int | None = None) -> bytes:
        return (await to_thread.run_sync(self._read))[start:end]

    async def exists(self) -> bool:
        return self._path.is_file()

    async def list(self) -> list[str]:
        return [f"hello-log:{path}" for path in sorted(self._path.parent.glob("*")) if not path.name.startswith(".")]

    async def delete(self) -> None:
        self._path.unlink(missing_ok=True)

    async def aclose(self) -> None:
        """Nothing is held between calls."""

    def _write(self, data: bytes, if_absent: bool) -> None:
        """Into a hidden file first; then one link (fails if the name exists) or one rename (replaces it)."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=".", dir=self._path.parent)
        partial = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if if_absent:
                self._path.hardlink_to(partial)
            else:
                partial.replace(self._path)
        except FileExistsError as error:
            raise StorageError(f"{self._path} exists already; choose another name or delete it") from error
        except OSError as error:  # a full disk may be emptied
            raise StorageError(f"{self._path} cannot be written: {error.strerror}", retryable=True) from error
        finally:
            partial.unlink(missing_ok=True)

    def _read(self) -> bytes:
        try:
            return self._path.read_bytes()
        except FileNotFoundError as error:
            raise StorageNotFoundError(f"there is no {self._path}") from error


@hookimpl
def infer_model_sources() -> list[ModelSourceSpec]:
    return [
        ModelSourceSpec(
            name="hello",
            api=1,
            factory="infer_hello:AliasSource",
            schemes=("hello",),
            example={"reference": "hello:default", "unknown": "hello:nobody"},
        )
    ]


@hookimpl
def infer_storage_targets() -> list[StorageTargetSpec]:
    return [
        StorageTargetSpec(
            name="hello-log",
            api=1,
            factory="infer_hello:LogTarget",
            schemes=("hello-log",),
            example={
                "uri": "hello-log:{tmp}/artifacts/",
                "options": {"level": "DEBUG"},
                "faults": "infer.testing.storage_faults:disk",
            },
        )
    ]
