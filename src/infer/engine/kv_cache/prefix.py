"""Content identity of KV blocks: a chain of hashes over token ids and what else the KV depends on.

Pure functions, used in the loop task. SHA-256, so that a hash can be shared between processes and hosts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

ExtraKey = tuple[str | int | bytes, ...]
"""A tagged fact that enters a block's hash: ("salt", text), ("adapter", content id), ("mm", item hash, offset)."""

_encode = msgspec.msgpack.Encoder().encode


def root_hash(model_identity: str, cache_dtype: str) -> bytes:
    """Parent of every first block: nothing is shared between different weights, or between caches of different dtypes."""
    return hashlib.sha256(_encode(("infer-kv-1", model_identity, cache_dtype))).digest()


def block_hash(parent: bytes, token_ids: Sequence[int], extra: Sequence[ExtraKey] = ()) -> bytes:
    """Hash of one full block after `parent`. Equal exactly when the whole sequence up to here is equal."""
    return hashlib.sha256(_encode((parent, token_ids, extra))).digest()


def first_block_extra(cache_salt: str | None, adapter: str | None) -> tuple[ExtraKey, ...]:
    """Facts hashed into the first block only; the chain carries them on. The tags keep equal strings apart."""
    extra: list[ExtraKey] = []
    if adapter is not None:
        extra.append(("adapter", adapter))
    if cache_salt is not None:
        extra.append(("salt", cache_salt))
    return tuple(extra)


def multimodal_extra(block_start: int, block_size: int, items: Sequence[tuple[str, int, int]]) -> tuple[ExtraKey, ...]:
    """Extra keys of a block that overlaps items (hash, first position, length): id and offset relative to the block."""
    return tuple(
        ("mm", item_hash, start - block_start)
        for item_hash, start, length in items
        if start < block_start + block_size and start + length > block_start
    )


def extend_chain(
    hashes: list[bytes], token_ids: Sequence[int], block_size: int, root: bytes, first_extra: Sequence[ExtraKey] = ()
) -> None:
    """Append to `hashes` the hashes of the full blocks of `token_ids` that it lacks: one hash per block."""
    for index in range(len(hashes), len(token_ids) // block_size):
        parent = hashes[-1] if hashes else root
        block = list(token_ids[index * block_size : (index + 1) * block_size])
        hashes.append(block_hash(parent, block, first_extra if index == 0 else ()))
