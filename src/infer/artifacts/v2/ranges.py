"""Reads boxes of arrays: which chunks they need, which of those lie side by side, one request for each run. Pure but for
the source it reads."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer.artifacts.byte_source import ByteSource
from infer.artifacts.v2.decoder import Chunk, chunks_of, decode_chunk
from infer.artifacts.v2.header import Array
from infer.artifacts.v2.limits import ALIGNMENT
from infer.artifacts.v2.values import DTYPES
from infer.errors import ArtifactError


@dataclass(frozen=True, slots=True)
class Selection:
    """Rows `first` to `end` of an array, and some of its columns (None: all)."""

    array: Array
    first: int
    end: int
    columns: tuple[int, ...] | None = None

    def chunks(self) -> list[Chunk]:
        if self.first >= self.end:
            return []
        return [
            chunk
            for chunk in chunks_of(self.array)
            if chunk.box[0] < self.end
            and self.first < chunk.box[1]
            and (self.columns is None or any(chunk.box[2] <= column < chunk.box[3] for column in self.columns))
        ]


def fetch(source: ByteSource, selections: Sequence[Selection]) -> list[NDArray[Any]]:
    """The selected parts as arrays of their own, read-only. Raises `ArtifactCorruptError`."""
    needed = [selection.chunks() for selection in selections]
    runs = _runs([chunk for chunks in needed for chunk in chunks])
    stored, starts = source.read_many(runs), [start for start, _ in runs]
    made = []
    for selection, chunks in zip(selections, needed, strict=True):
        out = _empty(selection)
        for chunk in chunks:
            run = bisect_right(starts, chunk.start) - 1
            first, end = chunk.start - starts[run], chunk.end - starts[run]
            values = decode_chunk(memoryview(stored[run])[first:end], chunk)
            _place(out, selection, chunk, values)
        out.flags.writeable = False
        made.append(out)
    return made


def _runs(chunks: list[Chunk]) -> list[tuple[int, int]]:
    """Chunks with nothing but padding between them are one range."""
    runs: list[tuple[int, int]] = []
    for start, end in sorted({(chunk.start, chunk.end) for chunk in chunks}):
        if runs and start - runs[-1][1] < ALIGNMENT:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((start, end))
    return runs


def _empty(selection: Selection) -> NDArray[Any]:
    shape = list(selection.array.shape)
    shape[0] = max(0, selection.end - selection.first)
    if selection.columns is not None:
        shape[1] = len(selection.columns)
    try:
        return np.empty(shape, DTYPES[selection.array.dtype])
    except MemoryError:
        raise ArtifactError(
            f"an array of shape {tuple(shape)} and {selection.array.dtype} does not fit in memory: read it in parts, with "
            "tokens=slice(first, end) or layers="
        ) from None


def _place(out: NDArray[Any], selection: Selection, chunk: Chunk, values: NDArray[Any]) -> None:
    first, end, left, right = chunk.box
    low, high = max(first, selection.first), min(end, selection.end)
    part = values[low - first : high - first]
    rows = slice(low - selection.first, high - selection.first)
    if out.ndim == 1:
        out[rows] = part
    elif selection.columns is None:
        out[rows, left:right] = part
    else:
        inside = [place for place, column in enumerate(selection.columns) if left <= column < right]
        out[rows, inside] = part[:, [selection.columns[place] - left for place in inside]]
