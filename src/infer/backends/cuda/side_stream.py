"""Two pieces of a small step at the same time: one on the current stream, one beside it. Neither alone fills a GPU then.

Called on the worker thread, also while a graph is captured; owns one stream.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from infer.backends.cuda.device import Device

MOST_TOKENS = 32
"""Larger steps fill the device with either piece, and two at a time would share its caches."""


class SideStream:
    """Memory needs no other care: what the side stream makes goes back to that stream, whose next work comes after all that
    was queued before it; and what it reads is freed when the current stream already comes after it."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream = device.new_stream()

    def beside(self, num_tokens: int, work: Callable[[], Tensor], other: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        """`plugins.platform.Ops.beside`."""
        if num_tokens > MOST_TOKENS:
            return work(), other()
        current = self._device.current_stream()
        self._stream.follow(current.mark())
        try:
            with self._device.using(self._stream):
                made = other()
            return work(), made
        finally:  # also after an error: what was queued beside still reads the step's tensors
            current.follow(self._stream.mark())
