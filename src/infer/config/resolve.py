"""Intent and facts to decisions: `resolve` is pure, leaves no blanks, and refuses before any weight file is opened."""

from __future__ import annotations

import msgspec

from infer.config.engine import EngineConfig
from infer.config.model import ModelConfig, ModelFootprint
from infer.config.platform import PlatformLimits


class ResolvedScheduler(msgspec.Struct, frozen=True, kw_only=True):
    """Same meanings as `SchedulerSection`; 0 stands for "no limit"."""

    max_num_seqs: int
    max_num_active_seqs: int
    max_num_batched_tokens: int
    max_num_waiting: int | None
    policy: str
    chunked_prefill: bool
    long_prefill_threshold: int
    max_num_partial_prefills: int
    max_long_partial_prefills: int
    reserve_full_prompt: bool
    in_flight_depth: int
    stream_interval: int
    scheduler_class: str | None
    max_model_len: int


class CacheGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One KV group as decided: usable blocks, the null block not counted."""

    name: str
    window: int | None
    num_blocks: int
    bytes_per_block: int
    """Over all layers of the group."""


class ResolvedCache(msgspec.Struct, frozen=True, kw_only=True):
    block_size: int
    dtype: str
    prefix_caching: bool
    watermark: float
    groups: tuple[CacheGroup, ...]


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes, as printed before loading. `available` is what the platform reported."""

    weights: int
    kv_cache: int
    workspace: int
    load_transient: int
    available: int


class ResolvedConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything decided. `notices` says in words what was chosen where the operator was silent or had to yield."""

    dtype: str
    platform: str
    threads: int
    scheduler: ResolvedScheduler
    cache: ResolvedCache
    memory: MemoryPlan
    notices: tuple[str, ...]


def resolve(
    config: EngineConfig, model: ModelConfig, limits: PlatformLimits, footprint: ModelFootprint
) -> ResolvedConfig:
    """Decide. Raises `ConfigError` naming both fields when two settings contradict, or the numbers when memory is short."""
    raise NotImplementedError
