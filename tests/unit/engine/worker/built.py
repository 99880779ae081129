"""A runner from a checkpoint on disk, built as an engine builds it. Test-only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infer.config.cache_dtype import choose_cache_dtype
from infer.config.engine import EngineConfig, PluginsSection
from infer.config.resolve import ResolvedConfig, choose_dtype, resolve_within
from infer.engine.worker.builder import WorkerBuilder
from infer.engine.worker.runner import Runner
from infer.plugins.manager import build_registry
from infer.plugins.registry import Registry
from infer.weights.facts import read_model_config


def builder(path: Path, registry: Registry | None = None) -> WorkerBuilder:
    registry = registry or build_registry(PluginsSection())
    facts = read_model_config(path, "test", registry.specs("model"))
    return WorkerBuilder(registry, facts, "reference", 1)


def build(path: Path, registry: Registry | None = None, **sections: Any) -> tuple[Runner, ResolvedConfig]:
    """Float32, blocks of 4, room for 128 blocks; `sections` override."""
    registry = registry or build_registry(PluginsSection())
    facts = read_model_config(path, "test", registry.specs("model"))
    defaults: dict[str, Any] = {
        "model": {"ref": str(path), "dtype": "float32"},
        "cache": {"block_size": 4, "num_blocks": 128},
        "scheduler": {"max_num_seqs": 4, "max_num_batched_tokens": 64},
    }
    config = EngineConfig(**defaults | sections)
    worker = WorkerBuilder(registry, facts, "reference", 1, capture=config.capture)
    limits = worker.limits()
    dtype = choose_dtype(config, facts, limits)
    cache_dtype = choose_cache_dtype(config, dtype)
    resolved = resolve_within(config, facts, limits, lambda bounds: worker.footprint(dtype, cache_dtype, bounds))
    return worker.build(resolved), resolved
