"""Opens an artifact anywhere, in either format: the beginning first, arrays when wanted, slices without the rest."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from infer.artifacts.byte_source import open_source
from infer.artifacts.reading import ArtifactReader
from infer.artifacts.v1.reader import V1Reader
from infer.artifacts.v2.limits import DEFAULT_LIMITS, MAGIC, Limits
from infer.artifacts.v2.reader import V2Reader
from infer.errors import ArtifactError


def open_artifact(
    source: str | os.PathLike[str] | bytes | bytearray | memoryview,
    *,
    storage_options: Mapping[str, Any] | None = None,
    parent: ArtifactReader | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> ArtifactReader:
    """Open bytes, a path or any fsspec URL; only the beginning is read.

    `storage_options` are the filesystem's. `parent` is the reader of the artifact that a delta continues: rows that the
    delta leaves out come from there. `limits` are what an object of the open format may need.
    Raises `ArtifactCorruptError`, `StorageNotFoundError`, `StorageUnavailableError`.
    """
    opened = open_source(source, storage_options)
    if bytes(opened.read(0, min(opened.size, len(MAGIC)))) == MAGIC:
        return V2Reader(opened, limits=limits, parent=parent)
    if parent is not None:
        raise ArtifactError("only an artifact of format generation_artifact_v2 has a parent")
    return V1Reader(opened)
