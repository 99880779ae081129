"""Captured rows of a finished choice as keys of the store, as far as the store has exactly these rows.

Part of the facade: called in the request's task, reads files in a thread; owns nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from infer.config.capture import CaptureProfile, ResolvedCapture, object_key, object_path
from infer.errors import InvalidRequestError
from infer.types import CapturedRows, SamplingParams

if TYPE_CHECKING:
    from pathlib import Path

    from infer.engine.kv_cache.manager import KVCacheManager
    from infer.engine.request import Request


def check_captured_as(params: SamplingParams, capture: ResolvedCapture | None) -> None:
    """Keys are of use only with rows to name and a store that others can read."""
    if params.captured_as == "rows":
        return
    if capture is None or capture.store_dir is None:
        reason = "needs a store that other processes can read: set capture.store_dir"
    elif not params.return_routed_experts:
        reason = "needs return_routed_experts=True: there are no captured rows to return"
    else:
        return
    raise InvalidRequestError(f"captured_as='keys' {reason}", parameter="captured_as", value="keys")


async def with_keys(
    capture: ResolvedCapture, kv: KVCacheManager, request: Request, captured: Mapping[str, CapturedRows]
) -> dict[str, CapturedRows]:
    """The same rows, named by keys where the store has them now. Not cancelled: what it waits for is a few file reads."""
    size = capture.block_size
    num_blocks = max((rows.start + rows.count) // size for rows in captured.values())
    hashes = list(kv.hashes(request, num_blocks))
    found = {}
    with anyio.CancelScope(shield=True):
        for name, rows in captured.items():
            profile = capture.profile(rows.field)
            if profile is None or rows.error is not None:
                found[name] = rows
            else:
                found[name] = await anyio.to_thread.run_sync(as_keys, rows, profile, capture, hashes)
    return found


def as_keys(
    rows: CapturedRows, profile: CaptureProfile, capture: ResolvedCapture, hashes: Sequence[bytes]
) -> CapturedRows:
    """Keys for the longest beginning whose objects are there and hold these very rows; the rest stays in `data`.

    Each object is compared: it may be of another request whose equal tokens were computed in another batch, it may not be
    written yet, and what was computed under two weight versions is never stored.
    """
    size, row_bytes = capture.block_size, profile.row_bytes
    data = memoryview(rows.data)
    keys: list[bytes] = []
    first, end = rows.start // size, (rows.start + rows.count) // size
    versions = _last_versions(rows, size)
    at = 0
    for block, kv_hash in zip(range(first, end), hashes[first:end], strict=False):
        key = object_key(capture.run + profile.digest, versions[block], kv_hash)
        until = ((block + 1) * size - rows.start) * row_bytes
        if _stored(object_path(str(capture.store_dir), profile.digest, key), until - at) != bytes(data[at:until]):
            break
        keys.append(key)
        at = until
    return replace(
        rows,
        data=bytes(data[at:]),
        model_identity=profile.model_identity,
        keys=tuple(keys),
        block_size=size,
        digest=hashlib.sha256(data).digest(),
    )


def _last_versions(rows: CapturedRows, size: int) -> dict[int, int]:
    """Block -> weight version of its last row, of every block that ends within the rows."""
    found: dict[int, int] = {}
    position = rows.start
    for count, version in rows.versions:
        found |= dict.fromkeys(range(position // size, (position + count) // size), version)
        position += count
    return found


def _stored(path: Path, num_bytes: int) -> bytes | None:
    """The last bytes of an object, which is complete if it is there at all."""
    try:
        return path.read_bytes()[-num_bytes:]
    except OSError:
        return None
