"""The distinct tokens of a request and how often each was sampled: what penalties look at. Owned by its `SamplingRow`.

Kept on the host: one id changes per step, and all rows of a batch go to the device in one copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class TokenCounts:
    """Grows by one id at a time."""

    def __init__(self, token_ids: Sequence[int], prompt_len: int) -> None:
        """`token_ids` are the prompt's, then the outputs so far; only outputs are counted."""
        counts = dict.fromkeys(token_ids[:prompt_len], 0)
        for token_id in token_ids[prompt_len:]:
            counts[token_id] = counts.get(token_id, 0) + 1
        self._place = {token_id: place for place, token_id in enumerate(counts)}
        capacity = max(64, 2 * len(counts))
        self._ids = np.zeros(capacity, dtype=np.int64)
        self._counts = np.zeros(capacity, dtype=np.float32)
        self._ids[: len(counts)] = list(counts)
        self._counts[: len(counts)] = list(counts.values())

    @property
    def ids(self) -> NDArray[np.int64]:
        """[n]: the distinct ids of prompt and output."""
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> NDArray[np.float32]:
        """[n]: how often each of `ids` is in the output."""
        return self._counts[: len(self._place)]

    def add(self, token_id: int) -> None:
        """Count one more output token."""
        place = self._place.get(token_id)
        if place is None:
            place = self._place[token_id] = len(self._place)
            if place == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[place] = token_id
        self._counts[place] += 1


def elements(
    index: Sequence[int], counts: Sequence[TokenCounts], width: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Row numbers and their counts -> for every (row, id): place in the flat logits [M * width], count, and number of
    its row within `index`."""
    sizes = [len(one.ids) for one in counts]
    row = np.repeat(np.arange(len(sizes)), sizes)
    flat = np.concatenate([one.ids for one in counts]) + np.asarray(index, dtype=np.int64)[row] * width
    count = np.concatenate([one.counts for one in counts])
    return tuple(torch.from_numpy(array).to(device) for array in (flat, count, row))  # type: ignore[return-value]
