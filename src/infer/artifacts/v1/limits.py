"""Wire constants and size arithmetic of `generation_artifact_v1`. Pure integers, no numpy: admission uses them too."""

from __future__ import annotations

FORMAT = "generation_artifact_v1"
MAGIC = b"DYNEXP1\0"
MAJOR, MINOR = 1, 0
CODEC_NONE, CODEC_ZSTD = 0, 1
PRELUDE_BYTES = 26
ALIGNMENT = 64
MAX_MANIFEST_BYTES = 2**20
MAX_PAYLOAD_BYTES = 2**26
MAX_ELEMENTS = 2**26
"""Largest product of a tensor's shape."""
MAX_ID = 2**63 - 1


def align64(size: int) -> int:
    """The next multiple of 64."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def zstd_bound(size: int) -> int:
    """Most bytes that one zstd frame of `size` bytes can take (ZSTD_COMPRESSBOUND)."""
    small = (131_072 - size) >> 11 if size < 131_072 else 0
    return size + (size >> 8) + small


def encoded_bound(manifest_bytes: int, payload_bytes: int) -> int:
    """Most bytes of a whole object, either codec."""
    return PRELUDE_BYTES + zstd_bound(align64(manifest_bytes) + payload_bytes)


MAX_OBJECT_BYTES = encoded_bound(MAX_MANIFEST_BYTES, MAX_PAYLOAD_BYTES)


def id_width(largest: int) -> int:
    """Bytes of the narrowest route type that holds ids up to `largest`."""
    if largest <= 0xFF:
        return 1
    if largest <= 0xFFFF:
        return 2
    return 4 if largest <= 2**31 - 1 else 8
