"""The KV connector that the settings name: what its blocks depend on, and how its two halves are made.

Part of the facade: `choose_connector` runs on the worker thread at start and reads the weight files for their digest.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import msgspec

from infer.artifacts.weights_digest import weights_digest
from infer.config.engine import EngineConfig
from infer.config.kv_connector import KVConnectorSection
from infer.config.model import ModelConfig
from infer.config.resolve import ResolvedConfig, expands_quantized
from infer.engine.kv_cache.external import ExternalKV
from infer.engine.kv_cache.manager import KVCacheManager
from infer.errors import ConfigError
from infer.plugins.kv_connector import KVFacts, KVGroupFacts, WorkerConnector
from infer.plugins.registry import Registry


@dataclass(frozen=True, slots=True)
class ChosenConnector:
    """A named connector and what it is told."""

    registry: Registry
    section: KVConnectorSection
    name: str
    facts: KVFacts

    def worker_half(self) -> WorkerConnector:
        """Raises `PluginError`, or what the plugin raises for its options."""
        made: WorkerConnector = self.registry.create(
            "kv_connector", self.name, dict(self.section.options), self.facts, field="worker_factory"
        )
        return made

    def external(self, kv: KVCacheManager) -> ExternalKV:
        """The scheduler half at work. Raises as `worker_half`."""
        section = self.section
        half = self.registry.create("kv_connector", self.name, dict(section.options), self.facts)
        fail = section.on_failure == "fail"
        return ExternalKV(half, kv, save=section.save, fail_requests=fail, timeout=section.timeout)


def choose_connector(
    config: EngineConfig, registry: Registry, model: ModelConfig, resolved: ResolvedConfig
) -> ChosenConnector | None:
    """None when no connector is named. Raises `UnknownPluginError`, or `ConfigError` when blocks of this model cannot be
    told from those of others."""
    section = config.kv_connector
    if section.name is None:
        return None
    registry.get("kv_connector", section.name)
    setting = f"kv_connector.name={section.name!r}"
    if not resolved.cache.groups:
        raise ConfigError(
            f"{setting}: this model has no KV cache that could be kept; leave it out", fields=("kv_connector.name",)
        )
    digest = weights_digest(model)
    if not digest:
        raise ConfigError(
            f"{setting}: the weight files of {model.path} cannot be read or have changed, so that their blocks cannot be told "
            "from those of other weights; start again with whole files, or leave it out",
            fields=("kv_connector.name",),
        )
    return ChosenConnector(registry, section, section.name, kv_facts(config, registry, model, resolved, digest))


def kv_facts(
    config: EngineConfig, registry: Registry, model: ModelConfig, resolved: ResolvedConfig, digest: str
) -> KVFacts:
    """Of an engine whose weights have this digest. Two engines have one namespace exactly when a block of one is, to the bit,
    what the other would compute (with `numerics.mode="invariant"`; in fast mode the last bits depend on the company)."""
    cache = resolved.cache
    plugins = [str(registry.origin("platform", resolved.platform))]
    plugins += [
        str(registry.origin("model", s.name)) for s in registry.specs("model") if model.architecture in s.architectures
    ]
    parts = (
        "infer-kv-blocks-1",
        digest,
        model.architecture,
        model.raw,
        plugins,
        resolved.platform,
        resolved.kernel_fingerprint,
        resolved.numerics,
        resolved.dtype,
        resolved.quantization,
        expands_quantized(config),
        cache.dtype,
        cache.block_size,
        [(group.name, group.window, group.bytes_per_block) for group in cache.groups],
    )
    encoded = msgspec.msgpack.encode(parts, enc_hook=str, order="sorted")
    groups = tuple(KVGroupFacts(block_bytes=g.bytes_per_block, window=g.window) for g in cache.groups)
    return KVFacts(namespace=hashlib.sha256(encoded).digest(), block_size=cache.block_size, groups=groups)
