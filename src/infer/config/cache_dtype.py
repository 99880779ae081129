"""What is computed in, and what keys and values are stored as: decided from what was asked and what the platform can. Pure."""

from __future__ import annotations

from infer.config.engine import EngineConfig
from infer.config.platform import PlatformLimits
from infer.errors import ConfigError


def choose_cache_dtype(config: EngineConfig, dtype: str) -> str:
    """Dtype of keys and values: the stated one, else the compute dtype."""
    return dtype if config.cache.dtype == "auto" else config.cache.dtype


def check_cache_dtype(config: EngineConfig, cache_dtype: str, limits: PlatformLimits) -> None:
    """Raises `ConfigError` when the platform stores nothing as `cache_dtype`."""
    if cache_dtype not in limits.cache_dtypes:
        field = "model.dtype" if config.cache.dtype == "auto" else "cache.dtype"
        raise ConfigError(
            f"{field}={cache_dtype}: platform {limits.name!r} stores keys and values as {', '.join(limits.cache_dtypes)}; "
            "choose one of these with cache.dtype, or another platform.name",
            fields=(field, "platform.name"),
        )


def check_compute_dtype(dtype: str, limits: PlatformLimits) -> None:
    """Raises `ConfigError` when the platform computes nothing in `dtype`."""
    if dtype not in limits.compute_dtypes:
        raise ConfigError(
            f"model.dtype={dtype}: platform {limits.name!r} computes in {', '.join(limits.compute_dtypes)}; choose one of these, "
            "or another platform.name",
            fields=("model.dtype", "platform.name"),
        )
