"""Every kind of plugin: its hook, its spec, the version of its contract, and what makes the previous version fit.

Plain data; owns nothing. A contract's version is raised in its own module, its upgrade is written here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from infer.plugins import (
    artifact_field,
    endpoint,
    grammar,
    kv_connector,
    logits_processor,
    model,
    model_source,
    parser,
    platform,
    quant_method,
    stat_logger,
    storage_target,
    tokenizer,
)
from infer.plugins.registry import Kind, Spec

Upgrade = Callable[[Any], Any]
"""From what a spec of the previous version names (a factory, a probe) to what the current version calls."""


class Contract(NamedTuple):
    """One kind's promise to its authors: the current version and the one before it are served."""

    hook: str
    spec_type: type[Spec]
    version: int
    previous: Mapping[str, Upgrade] = MappingProxyType({})
    """Field of the spec ("factory", "probe", ...) -> upgrade of what it names, for specs of version - 1. A field without one
    means the same in both versions."""
    changes: str = ""
    """What an author of the previous version has to change, in one sentence for the deprecation warning."""

    @property
    def supported(self) -> tuple[int, ...]:
        """Versions that are served, oldest first."""
        return tuple(version for version in (self.version - 1, self.version) if version >= 1)


CONTRACTS: dict[Kind, Contract] = {
    "platform": Contract("infer_platforms", platform.PlatformSpec, platform.API_VERSION),
    "model": Contract("infer_models", model.ModelSpec, model.API_VERSION),
    "quant_method": Contract("infer_quant_methods", quant_method.QuantMethodSpec, quant_method.API_VERSION),
    "kv_connector": Contract("infer_kv_connectors", kv_connector.KVConnectorSpec, kv_connector.API_VERSION),
    "artifact_field": Contract("infer_artifact_fields", artifact_field.ArtifactFieldSpec, artifact_field.API_VERSION),
    "storage_target": Contract("infer_storage_targets", storage_target.StorageTargetSpec, storage_target.API_VERSION),
    "parser": Contract("infer_parsers", parser.ParserSpec, parser.API_VERSION),
    "tokenizer": Contract("infer_tokenizers", tokenizer.TokenizerSpec, tokenizer.API_VERSION),
    "model_source": Contract("infer_model_sources", model_source.ModelSourceSpec, model_source.API_VERSION),
    "grammar": Contract("infer_grammars", grammar.GrammarSpec, grammar.API_VERSION),
    "logits_processor": Contract(
        "infer_logits_processors", logits_processor.LogitsProcessorSpec, logits_processor.API_VERSION
    ),
    "endpoint": Contract("infer_endpoints", endpoint.EndpointSpec, endpoint.API_VERSION),
    "stat_logger": Contract("infer_stat_loggers", stat_logger.StatLoggerSpec, stat_logger.API_VERSION),
}
