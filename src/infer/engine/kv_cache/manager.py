"""KV block accounting of requests over all KV groups: prefix hits, admission, growth, sliding windows, release.

Runs in the loop task; owns one block pool per group. A plain model has one group, a model without attention none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from infer.config.resolve import CacheGroup, ResolvedCache
from infer.engine.kv_cache.block_pool import BlockPool
from infer.engine.kv_cache.lineage import Lineage, PrefixEnd
from infer.engine.kv_cache.prefix import extend_chain, first_block_extra, root_hash

if TYPE_CHECKING:
    from infer.engine.request import Request


_UNLIMITED = 2**40
"""Blocks of a request in a model without attention."""


@dataclass(slots=True)
class RequestBlocks:
    """What one request holds: per group its block table, and the hashes of its full blocks of known tokens."""

    tables: list[list[int]] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    """Per group: leading table entries that fell out of the window (they read 0)."""
    capacity: int = 0
    """Positions that every group's table covers."""
    num_registered: int = 0
    """Full blocks already findable in the prefix cache."""
    hashes: list[bytes] = field(default_factory=list)
    """Survives preemption: the tokens do not change."""
    num_offered: int = 0
    """Full blocks that were offered for saving. Survives preemption: what is computed again is not saved again, or a pool just
    large enough for one request would never be free of what is being saved of it."""
    is_provisional: bool = False
    """It runs on blocks whose load is not known to have succeeded: nothing of it is made findable."""


@dataclass(slots=True)
class PrefixStats:
    """Counted once per admission, in tokens."""

    queried: int = 0
    hit: int = 0


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Blocks found for a request; `tables` holds 0 where a sliding window needs no block."""

    num_tokens: int
    tables: tuple[list[int], ...]


class KVCacheManager:
    """Hands blocks to requests and takes them back. Every answer is exact: nothing is over-committed."""

    def __init__(self, cache: ResolvedCache, model_identity: str, *, record_events: bool = False) -> None:
        self.block_size = cache.block_size
        self.prefix_caching = cache.prefix_caching and bool(cache.groups)
        self.groups: tuple[CacheGroup, ...] = cache.groups
        self.pools = [BlockPool(group.num_blocks, record_events=record_events) for group in cache.groups]
        # A sliding pool is sized for what its requests hold at most; a reserve could keep even the only one out for ever.
        self.watermarks = [0 if group.window else int(cache.watermark * group.num_blocks) for group in cache.groups]
        self.stats = PrefixStats()
        self.lineage = Lineage()
        self.on_registered: Callable[[Request, int, int], None] | None = None
        """Told of blocks first .. end of a request when they were made findable because it computes them."""
        self._root = root_hash(model_identity, cache.dtype)
        self._expired: list[tuple[BlockPool, list[int]]] = []
        self._registered: list[tuple[BlockPool, list[int]]] = []
        self._has_windows = any(group.window is not None for group in cache.groups)

    # -- admission ---------------------------------------------------------------------------------------------

    def max_request_tokens(self) -> int | None:
        """Longest sequence that can ever be admitted and grow to its end; None: no attention, no limit."""
        limits = [
            (pool.num_blocks - mark) * self.block_size
            for pool, mark, group in zip(self.pools, self.watermarks, self.groups, strict=True)
            if group.window is None
        ]
        return min(limits, default=None)

    def match(self, request: Request, max_blocks: int = _UNLIMITED) -> PrefixHit:
        """The longest cached beginning of at most `max_blocks` blocks."""
        hashes = self.matchable_hashes(request)
        hit = min(len(hashes), max_blocks)
        for pool, group in zip(self.pools, self.groups, strict=True):
            if group.window is None:
                hit = next((i for i in range(hit) if pool.find(hashes[i]) is None), hit)
        hit = self._shorten_to_windows(hashes, hit)
        tables = tuple(
            self._hit_table(pool, group, hashes[:hit]) for pool, group in zip(self.pools, self.groups, strict=True)
        )
        return PrefixHit(hit * self.block_size, tables)

    def matchable_hashes(self, request: Request) -> list[bytes]:
        """Hashes of the blocks that a hit may cover: all tokens but one, since the last must be computed to predict the
        next."""
        if not request.reads_prefix_cache:
            return []
        return self.hashes(request, (len(request.token_ids) - 1) // self.block_size)

    def hashes(self, request: Request, num_blocks: int) -> list[bytes]:
        """Of the request's first full blocks of known tokens; none where nothing is cached."""
        if not self.prefix_caching:
            return []
        self._extend_hashes(request, num_blocks)
        return request.blocks.hashes[:num_blocks]

    def is_cached(self, block_hash: bytes) -> bool:
        """Whether some group still has this content, in use or waiting for reuse."""
        return any(pool.find(block_hash) is not None for pool in self.pools)

    def admit(self, request: Request, hit: PrefixHit, num_tokens: int, *, reserve_tokens: int = 0) -> bool:
        """Give the request its hit and blocks up to `num_tokens`, or nothing at all.

        `reserve_tokens` asks full-attention groups for more; a sliding group never holds a whole prompt at once.
        """
        needed = self._needed(hit, num_tokens, reserve_tokens)
        if self._shortage(hit, needed) is not None:
            return False
        blocks = request.blocks
        blocks.tables = []
        for pool, table, count in zip(self.pools, hit.tables, needed, strict=True):
            pool.share(table)
            blocks.tables.append(table + pool.allocate(count))
        blocks.capacity = self._capacity(blocks)
        blocks.dropped = [next((i for i, block in enumerate(table) if block), len(table)) for table in hit.tables]
        blocks.num_registered = hit.num_tokens // self.block_size
        if self.prefix_caching and request.reads_prefix_cache:
            self.stats.queried += len(request.token_ids)
            self.stats.hit += hit.num_tokens
        return True

    def shortage(self, hit: PrefixHit, num_tokens: int, *, reserve_tokens: int = 0) -> tuple[int, int] | None:
        """What `admit` would lack: (blocks needed, blocks to be had) of the first pool that is short."""
        return self._shortage(hit, self._needed(hit, num_tokens, reserve_tokens))

    def fork(self, parent: Request, child: Request) -> list[tuple[int, int, int]] | None:
        """Give `child` the parent's prompt: full blocks are shared, an incomplete last one becomes a copy of its own.

        Returns the copies to make after the step, (group, source, destination); None when a pool is short.
        """
        full, rest = divmod(parent.prompt_len, self.block_size)
        if rest and any(pool.num_free <= mark for pool, mark in zip(self.pools, self.watermarks, strict=True)):
            return None
        blocks, source = child.blocks, parent.blocks
        copies: list[tuple[int, int, int]] = []
        for group, (pool, table) in enumerate(zip(self.pools, source.tables, strict=True)):
            shared = table[:full]
            pool.share(shared)
            own = pool.allocate(1) if rest else []
            blocks.tables.append(shared + own)
            copies += [(group, table[full], block) for block in own]
        blocks.capacity = self._capacity(blocks)
        blocks.dropped = [min(dropped, full) for dropped in source.dropped]
        blocks.hashes = source.hashes[:full]
        blocks.num_registered = min(source.num_registered, full)
        return copies

    # -- growth ------------------------------------------------------------------------------------------------

    def grow(self, request: Request, num_tokens: int) -> list[list[int]] | None:
        """New blocks per group so that the first `num_tokens` positions have one; None when some pool is short."""
        total = self._blocks_for(num_tokens)
        tables = request.blocks.tables
        needed = [max(0, total - len(table)) for table in tables]
        if any(count > pool.num_free for pool, count in zip(self.pools, needed, strict=True)):
            return None
        new = [pool.allocate(count) if count else [] for pool, count in zip(self.pools, needed, strict=True)]
        for table, blocks in zip(tables, new, strict=True):
            table += blocks
        request.blocks.capacity = self._capacity(request.blocks)
        return new

    def has_room(self, request: Request, num_tokens: int) -> bool:
        """Whether the request's tables already cover `num_tokens` positions (no call to `grow` needed)."""
        return request.blocks.capacity >= num_tokens

    def computed(self, request: Request) -> None:
        """The request's positions up to `num_computed` are computed by the plans handed out so far.

        Makes its new full blocks of known tokens findable, and marks blocks outside every window for release at
        the end of this scheduling round (until then rows of the same step may still read them).
        """
        if request.num_computed >= (request.blocks.num_registered + 1) * self.block_size:
            self.register(request)
        if self._has_windows:
            self._drop_expired(request)

    def register(self, request: Request) -> None:
        """Make the request's full, computed blocks of known tokens findable."""
        if not self.prefix_caching or request.blocks.is_provisional:
            return
        blocks = request.blocks
        full = min(request.num_computed, len(request.token_ids)) // self.block_size
        if full <= blocks.num_registered:
            return
        self._extend_hashes(request, full)
        hashes = blocks.hashes[blocks.num_registered : full]
        for pool, table in zip(self.pools, blocks.tables, strict=True):
            block_ids = table[blocks.num_registered : full]
            pool.register(block_ids, hashes)
            self._registered.append((pool, [block for block in block_ids if block]))
        for index in range(blocks.num_registered, full):
            parent = blocks.hashes[index - 1] if index else self._root
            tokens = request.token_ids[index * self.block_size : (index + 1) * self.block_size]
            self.lineage.note(parent, blocks.hashes[index], tokens)
        if self.on_registered is not None:
            self.on_registered(request, blocks.num_registered, full)
        blocks.num_registered = full

    def forget(self, request: Request) -> None:
        """The request's contents are not to be trusted (its row failed): nobody may find the blocks it alone holds."""
        for pool, table in zip(self.pools, request.blocks.tables, strict=False):
            pool.unregister([block for block in table if block and pool.ref_count(block) == 1])

    def end_step(self) -> list[tuple[BlockPool, list[int]]]:
        """After a plan is complete: release expired blocks; returns what was made findable, should the step fail."""
        for pool, block_ids in self._expired:
            pool.free(block_ids)
        self._expired = []
        registered, self._registered = self._registered, []
        return registered

    def release(self, request: Request) -> None:
        """Take back everything the request holds."""
        blocks = request.blocks
        for pool, table in zip(self.pools, blocks.tables, strict=False):
            pool.free(table)
        blocks.tables = []
        blocks.dropped = []
        blocks.capacity = 0
        blocks.num_registered = 0
        blocks.is_provisional = False

    def reset_prefix_cache(self) -> bool:
        """Forget all cached contents; refused (False) while any request holds blocks."""
        if any(pool.num_in_use for pool in self.pools):
            return False
        self.lineage.reset()
        return all(pool.reset() for pool in self.pools)

    def window_blocks(self, group: CacheGroup, num_tokens: int) -> int:
        """Leading blocks that no position >= num_tokens can see."""
        if group.window is None:
            return 0
        return max(0, num_tokens - group.window + 1) // self.block_size

    def prefix_end(self, request: Request, num_cached: int, *, cap_reached: bool = False) -> PrefixEnd:
        """Where the hit of `num_cached` tokens of a request that is being admitted ends, and why. `cap_reached`: the cache
        had more, but not the captured rows that belong to it."""
        if not self.prefix_caching:
            return PrefixEnd(cause="caching off")
        if not request.reads_prefix_cache:
            return PrefixEnd(cause="prompt logprobs")
        hashes, block = self.matchable_hashes(request), num_cached // self.block_size
        if block == len(hashes):
            return PrefixEnd(cause="complete")
        if cap_reached:
            return PrefixEnd(cause="captured rows missing", token=num_cached)
        if self.is_cached(hashes[block]):
            return PrefixEnd(cause="window", token=num_cached)
        loss = self.lineage.loss(hashes[block])
        if loss is not None:
            return PrefixEnd(cause=loss, token=num_cached)
        parent = hashes[block - 1] if block else self._root
        begin = block * self.block_size  # what an external store handed over may end inside a block
        near = self.lineage.nearest(parent, request.token_ids[begin : begin + self.block_size])
        if near is None or begin + near[0] < num_cached:
            return PrefixEnd(cause="never computed", token=num_cached)
        agree, cached_id = near
        if not self.lineage.tokens_known:
            return PrefixEnd(cause="other token")
        if cached_id is None:
            return PrefixEnd(cause="other salt", token=num_cached)
        return PrefixEnd(cause="other token", token=begin + agree, cached_id=cached_id)

    def usage(self) -> float:
        """Share of the fullest pool that is in use."""
        return max((pool.num_in_use / pool.num_blocks for pool in self.pools), default=0.0)

    # -- parts -------------------------------------------------------------------------------------------------

    def _needed(self, hit: PrefixHit, num_tokens: int, reserve_tokens: int) -> list[int]:
        """Blocks per group behind a hit."""
        totals = [max(num_tokens, reserve_tokens) if group.window is None else num_tokens for group in self.groups]
        return [self._blocks_for(total) - len(table) for total, table in zip(totals, hit.tables, strict=True)]

    def _shortage(self, hit: PrefixHit, needed: list[int]) -> tuple[int, int] | None:
        for pool, mark, table, count in zip(self.pools, self.watermarks, hit.tables, needed, strict=True):
            wanted = count + pool.num_idle(table)
            if wanted > pool.num_free - mark:
                return wanted, max(0, pool.num_free - mark)
        return None

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _capacity(self, blocks: RequestBlocks) -> int:
        return min((len(table) for table in blocks.tables), default=_UNLIMITED) * self.block_size

    def _extend_hashes(self, request: Request, num_blocks: int) -> None:
        hashes = request.blocks.hashes
        if len(hashes) < num_blocks:
            tokens = request.token_ids[: num_blocks * self.block_size]
            extend_chain(hashes, tokens, self.block_size, self._root, first_block_extra(request.cache_salt, None))

    def _shorten_to_windows(self, hashes: Sequence[bytes], hit: int) -> int:
        """Longest boundary <= hit whose last window of blocks is present in every sliding group."""
        stable = False
        while hit and not stable:
            stable = True
            for pool, group in zip(self.pools, self.groups, strict=True):
                if group.window is None:
                    continue
                shorter = self._window_boundary(pool, group, hashes, hit)
                stable = stable and shorter == hit
                hit = shorter
        return hit

    def _window_boundary(self, pool: BlockPool, group: CacheGroup, hashes: Sequence[bytes], hit: int) -> int:
        boundary = hit
        index = hit - 1
        while boundary and index >= self.window_blocks(group, boundary * self.block_size):
            if pool.find(hashes[index]) is None:
                boundary = index
            index -= 1
        return boundary

    def _hit_table(self, pool: BlockPool, group: CacheGroup, hashes: Sequence[bytes]) -> list[int]:
        skipped = self.window_blocks(group, len(hashes) * self.block_size)
        found = [pool.find(block_hash) for block_hash in hashes[skipped:]]
        return [0] * skipped + [block for block in found if block is not None]

    def _drop_expired(self, request: Request) -> None:
        blocks = request.blocks
        for index, (pool, group) in enumerate(zip(self.pools, self.groups, strict=True)):
            keep_from = self.window_blocks(group, request.num_computed)
            first = blocks.dropped[index]
            if keep_from > first:
                table = blocks.tables[index]
                keep_from = min(keep_from, len(table))
                self._expired.append((pool, table[first:keep_from]))
                table[first:keep_from] = [0] * (keep_from - first)
                blocks.dropped[index] = keep_from
