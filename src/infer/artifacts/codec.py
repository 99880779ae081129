"""Artifacts to bytes and back, whatever the format version. Pure; runs on any thread."""

from __future__ import annotations

import hashlib

from infer.artifacts.generation import GenerationArtifact
from infer.artifacts.v1.decoder import decode_v1
from infer.artifacts.v1.encoder import Codec, encode_v1
from infer.errors import ArtifactCorruptError


def encode(artifact: GenerationArtifact, codec: Codec = "zstd") -> bytes:
    """The object in the format `generation_artifact_v1`. Raises `ArtifactError` when the values do not fit together."""
    return encode_v1(artifact, codec).data


def decode(data: bytes | bytearray | memoryview, *, sha256: str | None = None) -> GenerationArtifact:
    """Read an object. Raises `ArtifactCorruptError`.

    The format has no checksum of its own: give `sha256` from the receipt, and any flipped bit is found.
    """
    if sha256 is not None:
        found = hashlib.sha256(data).hexdigest()
        if found != sha256.lower():
            raise ArtifactCorruptError(f"the object's SHA-256 is {found}; the receipt says {sha256}")
    return decode_v1(data)
