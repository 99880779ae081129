"""Generation artifacts: what a trainer needs of a generation, encoded, delivered, read back and verified.

Each name is loaded from its own module when it is first used; importing the package loads no numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infer.artifacts.codec import decode, encode
    from infer.artifacts.generation import ArtifactChoice, GenerationArtifact, RoutedExperts, SelectedLogprobs
    from infer.artifacts.judgement import Tolerance
    from infer.artifacts.reader import open_artifact
    from infer.artifacts.reading import ArtifactReader, FieldSummary
    from infer.artifacts.receipt import ArtifactReceipt
    from infer.artifacts.record import FieldRows, ParentReference, Provenance, WeightSpan
    from infer.artifacts.request import ArtifactParent, ArtifactRequest, ManagedTarget, PresignedTarget, SinkTarget
    from infer.artifacts.stored_rows import rebuild_rows
    from infer.artifacts.v2.limits import Limits
    from infer.artifacts.verify import VerifyReport, verify_artifact

_HOMES = {
    "codec": ("decode", "encode"),
    "generation": ("ArtifactChoice", "GenerationArtifact", "RoutedExperts", "SelectedLogprobs"),
    "judgement": ("Tolerance",),
    "reader": ("open_artifact",),
    "reading": ("ArtifactReader", "FieldSummary"),
    "receipt": ("ArtifactReceipt",),
    "record": ("FieldRows", "ParentReference", "Provenance", "WeightSpan"),
    "request": ("ArtifactParent", "ArtifactRequest", "ManagedTarget", "PresignedTarget", "SinkTarget"),
    "stored_rows": ("rebuild_rows",),
    "v2.limits": ("Limits",),
    "verify": ("VerifyReport", "verify_artifact"),
}

__all__ = [
    "ArtifactChoice",
    "ArtifactParent",
    "ArtifactReader",
    "ArtifactReceipt",
    "ArtifactRequest",
    "FieldRows",
    "FieldSummary",
    "GenerationArtifact",
    "Limits",
    "ManagedTarget",
    "ParentReference",
    "PresignedTarget",
    "Provenance",
    "RoutedExperts",
    "SelectedLogprobs",
    "SinkTarget",
    "Tolerance",
    "VerifyReport",
    "WeightSpan",
    "decode",
    "encode",
    "open_artifact",
    "rebuild_rows",
    "verify_artifact",
]


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            value = getattr(import_module(f"infer.artifacts.{module}"), name)
            globals()[name] = value  # the next access finds it without coming here
            return value
    raise AttributeError(f"module 'infer.artifacts' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
