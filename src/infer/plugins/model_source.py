"""Contract of a model source (hook `infer_model_sources`): turn a reference into a local directory or file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

API_VERSION = 1


@dataclass(frozen=True, slots=True)
class Progress:
    """One report of long work. `total` is None while unknown; units are bytes unless `unit` says otherwise."""

    stage: str
    """"download", "unpack", "verify", "build" (kernels for this CPU), "load"."""
    done: int
    total: int | None
    unit: str = "B"
    detail: str = ""


ProgressCallback = Callable[[Progress], None]
"""Called from the thread that does the work; must be quick and must not raise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSourceSpec:
    name: str
    api: int
    factory: str
    """"module:attr", called as `factory(cache_dir: Path, offline: bool, token: str | None) -> ModelSource`."""
    schemes: tuple[str, ...]
    """Reference prefixes before ":" it answers to, e.g. ("pypi",); "" stands for a bare reference,
    "*" for every URL ("scheme://...") that no other source names."""
    example: dict[str, Any]
    """{"reference": ...} that names something small, or {} when the kit has nothing to fetch. "unknown" may name a
    reference that cannot be found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """A model on local disk."""

    path: Path
    """A directory with config.json and weights, or one .gguf file."""
    reference: str
    identity: str
    """Content identity, e.g. "sha256:..." of the weights or of the package; part of the KV hash root."""


class ModelSource(Protocol):
    """Blocking; called on a worker thread."""

    def matches(self, reference: str) -> bool:
        """Whether this source answers for the reference (a bare path or name has no scheme)."""
        ...

    def resolve(self, reference: str, progress: ProgressCallback) -> ResolvedModel:
        """Fetch if needed. Raises `ModelError` naming the reference and the cure."""
        ...
