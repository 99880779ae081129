"""Facts probed from a platform. Plain data for `config.resolve`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformLimits:
    """What a platform offers now; sizes in bytes."""

    name: str
    total_memory: int
    """Bytes of memory the platform computes in."""
    available_memory: int
    """Bytes free for this process now (on CPU the smaller of MemAvailable and the cgroup limit left)."""
    dtypes: tuple[str, ...]
    """Compute dtypes that run natively, best first, e.g. ("bfloat16", "float32")."""
    threads: int
    compute_dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    """Compute dtypes that run at all."""
    cache_dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    """What keys and values can be stored as. Eight bits ("fp8_e4m3") are for platforms whose ops take scales."""
    invariant: bool = False
    """Whether every op computes a row with the same bits whatever else is in the step."""
    kernel_fingerprint: str = ""
    """Which kernels these are: changes with their code and with what they were built for; empty: the platform does not say."""
