"""How long an operation takes on the device. Runs in the process of a part; owns the buffer that empties the cache."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

cuda: Any = torch.cuda
"""Half of it has no types."""
CACHE_BYTES = 1 << 28
"""More than any L2 holds."""
WARM_UP = 3


class Clock:
    """The median of some calls; on a GPU by events, so that the time in which Python prepares a launch does not count."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self._device, self._repeats = device, repeats

    def seconds(self, work: Callable[[], object], *, cold: bool = True) -> float:
        """Of one call. cold: what the work reads comes from memory and not from a cache; emptying it also gives the host time
        to prepare the launch."""
        if self._device.type != "cuda":
            started = time.perf_counter()
            work()
            return max(time.perf_counter() - started, 1e-9)
        for _ in range(WARM_UP):
            work()
        pairs = []
        for _ in range(self._repeats):
            self._other.zero_()
            if not cold:
                work()
            begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize()
        return statistics.median(float(begin.elapsed_time(end)) for begin, end in pairs) / 1000

    @cached_property
    def _other(self) -> Tensor:
        return torch.empty(CACHE_BYTES, dtype=torch.uint8, device=self._device)
