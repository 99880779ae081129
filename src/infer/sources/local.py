"""Model source: a directory or a .gguf file on this machine, used where it is. Runs on a worker thread."""

from __future__ import annotations

from pathlib import Path

from infer.errors import ModelError
from infer.plugins.hookspecs import hookimpl
from infer.plugins.model_files import find_model, fingerprint
from infer.plugins.model_source import API_VERSION, ModelSourceSpec, ProgressCallback, ResolvedModel


class LocalSource:
    """Answers for bare references that exist as a path."""

    def __init__(self, cache_dir: Path, offline: bool, token: str | None) -> None:
        pass  # a local model needs none of them

    def matches(self, reference: str) -> bool:
        return _path(reference).exists()

    def resolve(self, reference: str, progress: ProgressCallback) -> ResolvedModel:
        path = _path(reference)
        if not path.exists():
            raise ModelError(f"{reference}: no such file or directory")
        try:
            model = find_model(path, reference)
            return ResolvedModel(path=model, reference=reference, identity=fingerprint(model))
        except OSError as error:
            raise ModelError(f"{reference} cannot be read: {error}") from error


def _path(reference: str) -> Path:
    path = Path(reference)
    # Path.expanduser raises for "~nobody"; such a name is simply a path that does not exist.
    return path.expanduser().absolute() if reference.startswith("~/") or reference == "~" else path.absolute()


def create(cache_dir: Path, offline: bool, token: str | None) -> LocalSource:
    return LocalSource(cache_dir, offline, token)


@hookimpl
def infer_model_sources() -> list[ModelSourceSpec]:
    return [
        ModelSourceSpec(
            name="local",
            api=API_VERSION,
            factory="infer.sources.local:create",
            schemes=("",),
            example={"reference": "."},
        )
    ]
