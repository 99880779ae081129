"""How many KV blocks each group gets for a number of bytes. Pure arithmetic over the layout; owns nothing.

Each group has a pool of its own; all groups use one block size, so equal block counts mean equal token capacity.
"""

from __future__ import annotations

from dataclasses import dataclass

from infer.config.model import KVGroup, KVLayout

ITEM_SIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDemand:
    """One group before blocks are counted."""

    name: str
    window: int | None
    bytes_per_block: int
    cap: int | None
    """More usable blocks than this can never be in use (sliding windows); None: no such bound."""


def bytes_per_block(layout: KVLayout, group: KVGroup, block_size: int, dtype: str) -> int:
    """Keys and values of one block over all layers of the group."""
    layers = {layer.layer_id: layer for layer in layout.layers}
    per_token = sum(layers[i].num_kv_heads * sum(layers[i].head_sizes) for i in group.layer_ids)
    return per_token * block_size * ITEM_SIZE[dtype]


def blocks_per_sequence(window: int | None, num_tokens: int, block_size: int, max_num_batched_tokens: int) -> int:
    """Blocks that one sequence of `num_tokens` holds at most at one time.

    A sliding group holds its window plus the chunk being computed; one more because neither need start on a block's edge.
    """
    whole = -(-num_tokens // block_size)
    if window is None:
        return whole
    return min(whole, -(-(window + max_num_batched_tokens) // block_size) + 1)


def admissible(num_blocks: int, watermark: float) -> int:
    """Of a pool's blocks, those a request may take when it is admitted; the scheduler keeps the rest free."""
    return num_blocks - int(watermark * num_blocks)


def with_watermark(count: int, watermark: float) -> int:
    """The smallest pool of which `count` blocks are admissible."""
    total = int(count / (1 - watermark))
    while admissible(total, watermark) < count:
        total += 1
    return total


def longest_sequence(
    groups: tuple[GroupDemand, ...], main_blocks: int, block_size: int, max_num_batched_tokens: int, watermark: float
) -> int | None:
    """Tokens of the longest sequence that can run alone; None when every group slides and no length is too long."""
    limits = []
    for group, count in zip(groups, block_counts(groups, main_blocks), strict=True):
        usable = admissible(count, watermark)
        endless = blocks_per_sequence(group.window, 2**62, block_size, max_num_batched_tokens)
        if group.window is None or usable < endless:
            limits.append(usable * block_size)
    return min(limits, default=None)


def demands(
    layout: KVLayout, *, block_size: int, dtype: str, max_num_seqs: int, max_num_batched_tokens: int, watermark: float
) -> tuple[GroupDemand, ...]:
    """The layout's groups. The main group (the first without a window, else the first) has no cap: it takes what is given."""
    main = main_group(layout)
    out = []
    for index, group in enumerate(layout.groups):
        cap = None
        if group.window is not None and index != main:
            each = blocks_per_sequence(group.window, 2**62, block_size, max_num_batched_tokens)
            cap = with_watermark(max_num_seqs * each, watermark)
        size = bytes_per_block(layout, group, block_size, dtype)
        out.append(GroupDemand(name=group.name, window=group.window, bytes_per_block=size, cap=cap))
    return tuple(out)


def main_group(layout: KVLayout) -> int:
    """Index of the group whose block count `cache.num_blocks` states."""
    return next((i for i, group in enumerate(layout.groups) if group.window is None), 0)


def block_counts(groups: tuple[GroupDemand, ...], main_blocks: int) -> tuple[int, ...]:
    """Usable blocks per group when the main group has `main_blocks`."""
    return tuple(main_blocks if group.cap is None else min(main_blocks, group.cap) for group in groups)


def usable_bytes(groups: tuple[GroupDemand, ...], main_blocks: int) -> int:
    """Bytes of the usable blocks of all groups."""
    counts = block_counts(groups, main_blocks)
    return sum(count * group.bytes_per_block for count, group in zip(counts, groups, strict=True))


def null_bytes(groups: tuple[GroupDemand, ...]) -> int:
    """Bytes of the null block that each pool has on top of its usable ones."""
    return sum(group.bytes_per_block for group in groups)


def blocks_within(groups: tuple[GroupDemand, ...], budget: int) -> int:
    """The most main-group blocks whose usable bytes over all groups stay within `budget`."""
    uncapped = sum(group.bytes_per_block for group in groups if group.cap is None)
    low, high = 0, max(budget, 0) // uncapped
    while low < high:
        middle = (low + high + 1) // 2
        if usable_bytes(groups, middle) <= budget:
            low = middle
        else:
            high = middle - 1
    return low
