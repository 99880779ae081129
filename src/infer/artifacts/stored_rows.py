"""Captured rows that were returned as keys, made whole again from the store's directory; needs no engine.

Pure functions over files, in any process of the user who runs the engine; own nothing.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace

import numpy as np

from infer.config.capture import ITEM_SIZES, CaptureProfile, object_path
from infer.errors import ArtifactCorruptError, ArtifactError, CapturedBlockMissingError
from infer.types import CapturedRows

INTEGERS = ("uint8", "uint16", "int32")


def rebuild_rows(rows: CapturedRows, store_dir: str | os.PathLike[str]) -> CapturedRows:
    """The same rows with all of `data` and no keys, byte for byte as they were computed for the request; rows without keys
    come back as they are. `store_dir` is the engine's capture.store_dir.

    Raises `CapturedBlockMissingError` for an object that the engine has evicted, and `ArtifactCorruptError` for rows that are
    not those of the request or that no model gives.
    """
    if rows.error is not None:
        raise ArtifactError(f"{rows.field}: there are no rows: {rows.error}")
    if not rows.keys:
        return rows
    profile = profile_of(rows)
    row_bytes, num_keyed = profile.row_bytes, keyed_rows(rows.start, rows.block_size, len(rows.keys))
    if num_keyed * row_bytes + len(rows.data) != rows.count * row_bytes:
        raise ArtifactCorruptError(
            f"{rows.field}: {len(rows.keys)} keys from row {rows.start} on and {len(rows.data)} bytes behind them are not "
            f"{rows.count} rows of {row_bytes} bytes"
        )
    parts = [_read(store_dir, profile.digest, key, rows.block_size * row_bytes) for key in rows.keys]
    parts[0] = parts[0][rows.start % rows.block_size * row_bytes :]
    data = b"".join([*parts, rows.data])
    if hashlib.sha256(data).digest() != rows.digest:
        raise ArtifactCorruptError(
            f"{rows.field}: what the store has under these keys are not the rows of this request: an object was evicted and "
            "computed again, or changed"
        )
    _check_ids(rows, data)
    return replace(rows, data=data, keys=(), block_size=0, digest=b"")


def profile_of(rows: CapturedRows) -> CaptureProfile:
    """What one of these rows is. Raises `ArtifactCorruptError`."""
    known = isinstance(rows.dtype, str) and rows.dtype in ITEM_SIZES
    if not known or rows.block_size < 1 or rows.start < 0 or any(size < 1 for size in rows.row_shape):
        raise ArtifactCorruptError(
            f"{rows.field}: no store has blocks of {rows.block_size} rows {rows.row_shape} of {rows.dtype!r} from row "
            f"{rows.start} on"
        )
    return CaptureProfile(
        name=rows.field,
        dtype=rows.dtype,
        row_shape=tuple(rows.row_shape),
        layer_ids=tuple(rows.layer_ids),
        num_experts=rows.num_experts,
        model_identity=rows.model_identity,
    )


def keyed_rows(start: int, block_size: int, num_keys: int) -> int:
    """Rows from `start` on that lie in this many objects."""
    return (start // block_size + num_keys) * block_size - start if num_keys else 0


def _read(store_dir: str | os.PathLike[str], digest: bytes, key: bytes, size: int) -> bytes:
    """A whole object. Raises for one that is of another profile, gone, or of another size."""
    if digest not in key:
        raise ArtifactCorruptError(
            f"key {key.hex()} is not of the profile {digest.hex()} that its rows are said to have"
        )
    try:
        with object_path(store_dir, digest, key).open("rb") as file:
            data = file.read(size + 1)
    except FileNotFoundError:
        raise CapturedBlockMissingError(
            f"{os.fspath(store_dir)} has no object {key.hex()}: it was evicted (raise capture.max_bytes, or read sooner), or "
            "this is another directory",
            key=key,
        ) from None
    except OSError as error:
        raise ArtifactError(f"object {key.hex()} cannot be read: {error}") from error
    if len(data) != size:
        raise ArtifactCorruptError(f"object {key.hex()} has not the {size} bytes of a block")
    return data


def _check_ids(rows: CapturedRows, data: bytes) -> None:
    if rows.num_experts and rows.dtype in INTEGERS and data:
        ids = np.frombuffer(data, np.dtype(rows.dtype).newbyteorder("<"))
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= rows.num_experts:
            raise ArtifactCorruptError(
                f"{rows.field}: expert {low if low < 0 else high} is not one of the {rows.num_experts} that there are"
            )
