"""Artifacts to bytes and back, whatever the format version. Pure; runs on any thread."""

from __future__ import annotations

import hashlib
from typing import Literal

from infer.artifacts.byte_source import MemorySource
from infer.artifacts.generation import GenerationArtifact
from infer.artifacts.v1.decoder import decode_v1
from infer.artifacts.v1.encoder import Codec, encode_v1
from infer.artifacts.v1.limits import FORMAT as FORMAT_V1
from infer.artifacts.v2.conversion import record_of
from infer.artifacts.v2.limits import FORMAT as FORMAT_V2
from infer.artifacts.v2.limits import MAGIC
from infer.artifacts.v2.reader import V2Reader
from infer.artifacts.v2.writer import encode_v2
from infer.errors import ArtifactCorruptError, ArtifactError

Format = Literal["generation_artifact_v1", "generation_artifact_v2"]


def encode(artifact: GenerationArtifact, codec: Codec = "zstd", *, format: Format = "generation_artifact_v1") -> bytes:
    """The object in one of the two formats. Raises `ArtifactError` when the values do not fit together."""
    if format == FORMAT_V2:
        return encode_v2(record_of(artifact), codec=codec).data
    if format != FORMAT_V1:
        raise ArtifactError(f"format={format!r}; it must be {FORMAT_V1!r} or {FORMAT_V2!r}")
    return encode_v1(artifact, codec).data


def decode(data: bytes | bytearray | memoryview, *, sha256: str | None = None) -> GenerationArtifact:
    """Read and check an object of either format. Raises `ArtifactCorruptError`; a delta, whose first tokens are elsewhere,
    needs `open_artifact(..., parent=...)`.

    v1 has no checksum of its own: give `sha256` from the receipt, and any flipped bit is found. v2 has.
    """
    if sha256 is not None:
        found = hashlib.sha256(data).hexdigest()
        if found != sha256.lower():
            raise ArtifactCorruptError(f"the object's SHA-256 is {found}; the receipt says {sha256}")
    if bytes(memoryview(data).cast("B")[: len(MAGIC)]) != MAGIC:
        return decode_v1(data)
    reader = V2Reader(MemorySource(data))
    reader.verify()
    return reader.artifact()
