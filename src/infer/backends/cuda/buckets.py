"""For how many rows decode steps are recorded. Pure."""

from __future__ import annotations

SMALL = (1, 2, 4, 8)
STEP = 8
"""Rows of a tile of tensor cores: in between nothing is gained."""


def graph_sizes(max_rows: int) -> tuple[int, ...]:
    """Ascending, the last is `max_rows`. From 33 rows on about a fifth of a step's rows are padding at most, and the number
    of sizes grows with the logarithm of `max_rows`."""
    sizes = [size for size in SMALL if size < max_rows]
    size = SMALL[-1]
    while (size := size + max(STEP, size // 4 // STEP * STEP)) < max_rows:
        sizes.append(size)
    return (*sizes, max_rows)
