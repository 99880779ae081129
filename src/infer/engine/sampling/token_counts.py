"""The distinct tokens of a request and how often each was sampled: what penalties look at. Owned by its `SamplingRow`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class TokenCounts:
    """Grows by one id at a time. Ids and counts stay on the device, so that a penalty touches only these logits."""

    def __init__(self, token_ids: Sequence[int], prompt_len: int, device: torch.device) -> None:
        """`token_ids` are the prompt's, then the outputs so far; only outputs are counted."""
        counts = dict.fromkeys(token_ids[:prompt_len], 0)
        for token_id in token_ids[prompt_len:]:
            counts[token_id] = counts.get(token_id, 0) + 1
        self._place = {token_id: place for place, token_id in enumerate(counts)}
        capacity = max(64, 2 * len(counts))
        self._ids = torch.zeros(capacity, dtype=torch.int64, device=device)
        self._counts = torch.zeros(capacity, dtype=torch.float32, device=device)
        self._ids[: len(counts)] = torch.tensor(list(counts), dtype=torch.int64, device=device)
        self._counts[: len(counts)] = torch.tensor(list(counts.values()), dtype=torch.float32, device=device)

    @property
    def ids(self) -> Tensor:
        """[n] int64: the distinct ids of prompt and output."""
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> Tensor:
        """[n] float32: how often each of `ids` is in the output."""
        return self._counts[: len(self._place)]

    def add(self, token_id: int) -> None:
        """Count one more output token."""
        place = self._place.get(token_id)
        if place is None:
            place = self._place[token_id] = len(self._place)
            if place == len(self._ids):
                self._ids = torch.cat((self._ids, torch.zeros_like(self._ids)))
                self._counts = torch.cat((self._counts, torch.zeros_like(self._counts)))
            self._ids[place] = token_id
        self._counts[place] += 1
