"""What has followed what in the prefix cache: enough to say where a prompt leaves everything that was cached, and why.

Runs in the loop task; owns the notes, whose number is bounded. The cache itself does not depend on them.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal

import msgspec

MAX_BLOCKS = 65_536


class PrefixEnd(msgspec.Struct, kw_only=True):
    """Where a prefix hit ends, and why there."""

    cause: Literal[
        "complete",
        "other token",
        "other salt",
        "never computed",
        "evicted",
        "reset",
        "window",
        "captured rows missing",
        "prompt logprobs",
        "caching off",
        "shared prompt",
    ]
    token: int | None = None
    """0-based index of the first token that is not as in what is cached; with other causes, the first that was not found."""
    cached_id: int | None = None
    """The token id that the cache has there ("other token"): of the entry that agrees longest."""


_Follower = tuple[bytes, bytes]
"""Its token ids packed so that their order stays, and its hash. Bytes, because there is one for every block and the garbage
collector does not follow tuples of them."""


class Lineage:
    """Blocks that were made findable, the oldest forgotten first. `tokens_known` False: the token ids are not the real ones
    (a replayed step log without them), so that nothing can be said of them."""

    def __init__(self) -> None:
        self.tokens_known = True
        self._resets = 0
        self._blocks: OrderedDict[bytes, tuple[bytes, _Follower, int]] = OrderedDict()
        """Hash -> (its parent, its place there, how often the cache was reset before)."""
        self._followers: dict[bytes, list[_Follower]] = {}
        """Hash -> what followed it, in the order of token ids."""

    def note(self, parent: bytes, block_hash: bytes, token_ids: Sequence[int]) -> None:
        """A block behind `parent` is findable now."""
        found = self._blocks.get(block_hash)
        if found is not None:
            self._blocks.move_to_end(block_hash)
            self._blocks[block_hash] = (*found[:2], self._resets)
            return
        follower = (_pack(token_ids), block_hash)
        self._blocks[block_hash] = (parent, follower, self._resets)
        insort(self._followers.setdefault(parent, []), follower)
        if len(self._blocks) > MAX_BLOCKS:
            _, (before, oldest, _) = self._blocks.popitem(last=False)
            followers = self._followers[before]
            del followers[bisect_left(followers, oldest)]
            if not followers:
                del self._followers[before]

    def reset(self) -> None:
        """The cache forgot everything on purpose."""
        self._resets += 1

    def loss(self, block_hash: bytes) -> Literal["evicted", "reset"] | None:
        """Why a block that was findable is not: "evicted" or "reset"; None: it never was, as far as is known."""
        found = self._blocks.get(block_hash)
        if found is None:
            return None
        return "evicted" if found[2] == self._resets else "reset"

    def nearest(self, parent: bytes, token_ids: Sequence[int]) -> tuple[int, int | None] | None:
        """Of the blocks that have followed `parent`, the one that agrees longest with these: (tokens that agree, its next
        token; None where all agree). None: nothing has followed it."""
        followers = self._followers.get(parent)
        if not followers:
            return None
        at = bisect_left(followers, (_pack(token_ids), b""))
        best: tuple[int, int | None] = (-1, None)
        for data, _ in followers[max(0, at - 1) : at + 1]:  # sorted: the longest agreement is next to it
            known = struct.unpack(f">{len(token_ids)}q", data)
            agree = next((i for i, (a, b) in enumerate(zip(known, token_ids, strict=True)) if a != b), len(known))
            if agree > best[0]:
                best = (agree, known[agree] if agree < len(known) else None)
        return best


def _pack(token_ids: Sequence[int]) -> bytes:
    return struct.pack(f">{len(token_ids)}q", *token_ids)
