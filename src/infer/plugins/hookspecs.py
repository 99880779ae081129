"""The hooks a plugin may implement. Each declares specs; none is on the hot path, none is async.

Called once when an engine (or `infer plugins`) builds its registry.
"""

from __future__ import annotations

import pluggy

from infer.plugins.artifact_field import ArtifactFieldSpec
from infer.plugins.endpoint import EndpointSpec
from infer.plugins.grammar import GrammarSpec
from infer.plugins.kv_connector import KVConnectorSpec
from infer.plugins.logits_processor import LogitsProcessorSpec
from infer.plugins.model import ModelSpec
from infer.plugins.model_source import ModelSourceSpec
from infer.plugins.parser import ParserSpec
from infer.plugins.platform import PlatformSpec
from infer.plugins.quant_method import QuantMethodSpec
from infer.plugins.stat_logger import StatLoggerSpec
from infer.plugins.storage_target import StorageTargetSpec
from infer.plugins.tokenizer import TokenizerSpec

PROJECT = "infer"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def infer_platforms() -> list[PlatformSpec]:
    """Platforms this plugin adds."""
    raise NotImplementedError


@hookspec
def infer_models() -> list[ModelSpec]:
    """Model architectures this plugin adds."""
    raise NotImplementedError


@hookspec
def infer_quant_methods() -> list[QuantMethodSpec]:
    """Weight quantization methods this plugin adds."""
    raise NotImplementedError


@hookspec
def infer_kv_connectors() -> list[KVConnectorSpec]:
    """External KV stores this plugin adds."""
    raise NotImplementedError


@hookspec
def infer_artifact_fields() -> list[ArtifactFieldSpec]:
    """Per-token artifact fields this plugin adds."""
    raise NotImplementedError


@hookspec
def infer_storage_targets() -> list[StorageTargetSpec]:
    """Storage targets this plugin adds."""
    raise NotImplementedError


@hookspec
def infer_parsers() -> list[ParserSpec]:
    """Output parsers this plugin adds."""
    raise NotImplementedError


@hookspec
def infer_tokenizers() -> list[TokenizerSpec]:
    """Tokenizers this plugin adds."""
    raise NotImplementedError


@hookspec
def infer_model_sources() -> list[ModelSourceSpec]:
    """Model sources this plugin adds."""
    raise NotImplementedError


@hookspec
def infer_grammars() -> list[GrammarSpec]:
    """Grammar backends this plugin adds."""
    raise NotImplementedError


@hookspec
def infer_logits_processors() -> list[LogitsProcessorSpec]:
    """Logits processors this plugin adds."""
    raise NotImplementedError


@hookspec
def infer_endpoints() -> list[EndpointSpec]:
    """HTTP routes this plugin adds, for servers whose `api.endpoints` names them."""
    raise NotImplementedError


@hookspec
def infer_stat_loggers() -> list[StatLoggerSpec]:
    """Statistics loggers this plugin adds, for engines whose `plugins.stat_loggers` names them."""
    raise NotImplementedError
