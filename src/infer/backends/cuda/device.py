"""What kernels need to know of a GPU to choose tiles. Plain data; the platform fills it once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """One GPU."""

    multiprocessors: int
    """How many programs run at a time, at least: a grid should have a few times as many."""
    shared_memory: int
    """Bytes that one program may use."""
    native_fp8: bool
    """Whether it computes with float8_e4m3fn (NVIDIA from 8.9); without, kernels read its bits."""
    asynchronous_products: bool = False
    """Whether matrix units read shared memory by themselves (NVIDIA from 9.0): larger tiles pay then."""
