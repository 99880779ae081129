"""Contracts of everything that varies, the hooks that declare them, and the registry that finds them.

What a plugin author imports; each name is loaded from its own module when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infer.plugins.artifact_field import ArtifactField, ArtifactFieldSpec, TapFacts, whole_rows
    from infer.plugins.checkpoint_format import (
        CheckpointFormat,
        GroupedRows,
        StoredTensor,
        StoredWeight,
        check_matrix,
        check_tensor,
    )
    from infer.plugins.endpoint import (
        EndpointCall,
        EndpointEvents,
        EndpointHandler,
        EndpointReply,
        EndpointRoute,
        EndpointServer,
        EndpointSpec,
    )
    from infer.plugins.grammar import Grammar, GrammarBackend, GrammarSource, GrammarSpec, Matcher, Vocabulary
    from infer.plugins.hookspecs import hookimpl
    from infer.plugins.kv_connector import (
        ExternalMatch,
        KVBlock,
        KVBlocks,
        KVConnectorSpec,
        KVFacts,
        KVGroupFacts,
        KVReport,
        KVTransfer,
        SchedulerConnector,
        WorkerConnector,
    )
    from infer.plugins.kv_store import KVStore, StoreMatcher, StoreTransfer
    from infer.plugins.logits_processor import LogitsProcessor, LogitsProcessorSpec, LogitsRow
    from infer.plugins.manager import build_registry
    from infer.plugins.model import (
        BuildContext,
        CausalLM,
        ForwardBatch,
        GGUFNames,
        ModelSpec,
        SupportsHiddenTaps,
        SupportsRouteTaps,
    )
    from infer.plugins.model_source import ModelSource, ModelSourceSpec, Progress, ProgressCallback, ResolvedModel
    from infer.plugins.parser import CallSyntax, Parser, ParserEvent, ParserSpec, SupportsPrompt
    from infer.plugins.platform import (
        Attend,
        AttentionMetadata,
        BlockFormat,
        BlockOps,
        ExpertStack,
        Fetch,
        Graph,
        Ops,
        Platform,
        PlatformSpec,
        Probe,
        RotateAndWriteKV,
        Routing,
        SupportsGraphs,
        SupportsGraphSizes,
        SupportsStaging,
        SupportsWorkspace,
        WriteKV,
    )
    from infer.plugins.quant_method import (
        PLAIN_WEIGHTS,
        LoadTimeMethod,
        QuantMethod,
        QuantMethodSpec,
        SupportsPlatformEncoders,
    )
    from infer.plugins.registry import Entry, Registry
    from infer.plugins.stat_logger import EngineFacts, StatLogger, StatLoggerSpec, StepSnapshot
    from infer.plugins.storage_target import StorageTarget, StorageTargetSpec, SupportsExpiry, SupportsRead
    from infer.plugins.tokenizer import DecodeStream, SupportsTokenBytes, Tokenizer, TokenizerSpec

_HOMES = {
    "artifact_field": ("ArtifactField", "ArtifactFieldSpec", "TapFacts", "whole_rows"),
    "checkpoint_format": (
        "CheckpointFormat",
        "GroupedRows",
        "StoredTensor",
        "StoredWeight",
        "check_matrix",
        "check_tensor",
    ),
    "endpoint": (
        "EndpointCall",
        "EndpointEvents",
        "EndpointHandler",
        "EndpointReply",
        "EndpointRoute",
        "EndpointServer",
        "EndpointSpec",
    ),
    "grammar": ("Grammar", "GrammarBackend", "GrammarSource", "GrammarSpec", "Matcher", "Vocabulary"),
    "hookspecs": ("hookimpl",),
    "kv_connector": (
        "ExternalMatch",
        "KVBlock",
        "KVBlocks",
        "KVConnectorSpec",
        "KVFacts",
        "KVGroupFacts",
        "KVReport",
        "KVTransfer",
        "SchedulerConnector",
        "WorkerConnector",
    ),
    "kv_store": ("KVStore", "StoreMatcher", "StoreTransfer"),
    "logits_processor": ("LogitsProcessor", "LogitsProcessorSpec", "LogitsRow"),
    "manager": ("build_registry",),
    "model": (
        "BuildContext",
        "CausalLM",
        "ForwardBatch",
        "GGUFNames",
        "ModelSpec",
        "SupportsHiddenTaps",
        "SupportsRouteTaps",
    ),
    "model_source": ("ModelSource", "ModelSourceSpec", "Progress", "ProgressCallback", "ResolvedModel"),
    "parser": ("CallSyntax", "Parser", "ParserEvent", "ParserSpec", "SupportsPrompt"),
    "platform": (
        "Attend",
        "AttentionMetadata",
        "BlockFormat",
        "BlockOps",
        "ExpertStack",
        "Fetch",
        "Graph",
        "Ops",
        "Platform",
        "PlatformSpec",
        "Probe",
        "RotateAndWriteKV",
        "Routing",
        "SupportsGraphSizes",
        "SupportsGraphs",
        "SupportsStaging",
        "SupportsWorkspace",
        "WriteKV",
    ),
    "quant_method": ("PLAIN_WEIGHTS", "LoadTimeMethod", "QuantMethod", "QuantMethodSpec", "SupportsPlatformEncoders"),
    "registry": ("Entry", "Registry"),
    "stat_logger": ("EngineFacts", "StatLogger", "StatLoggerSpec", "StepSnapshot"),
    "storage_target": ("StorageTarget", "StorageTargetSpec", "SupportsExpiry", "SupportsRead"),
    "tokenizer": ("DecodeStream", "SupportsTokenBytes", "Tokenizer", "TokenizerSpec"),
}

__all__ = [
    "PLAIN_WEIGHTS",
    "ArtifactField",
    "ArtifactFieldSpec",
    "Attend",
    "AttentionMetadata",
    "BlockFormat",
    "BlockOps",
    "BuildContext",
    "CallSyntax",
    "CausalLM",
    "CheckpointFormat",
    "DecodeStream",
    "EndpointCall",
    "EndpointEvents",
    "EndpointHandler",
    "EndpointReply",
    "EndpointRoute",
    "EndpointServer",
    "EndpointSpec",
    "EngineFacts",
    "Entry",
    "ExpertStack",
    "ExternalMatch",
    "Fetch",
    "ForwardBatch",
    "GGUFNames",
    "Grammar",
    "GrammarBackend",
    "GrammarSource",
    "GrammarSpec",
    "Graph",
    "GroupedRows",
    "KVBlock",
    "KVBlocks",
    "KVConnectorSpec",
    "KVFacts",
    "KVGroupFacts",
    "KVReport",
    "KVStore",
    "KVTransfer",
    "LoadTimeMethod",
    "LogitsProcessor",
    "LogitsProcessorSpec",
    "LogitsRow",
    "Matcher",
    "ModelSource",
    "ModelSourceSpec",
    "ModelSpec",
    "Ops",
    "Parser",
    "ParserEvent",
    "ParserSpec",
    "Platform",
    "PlatformSpec",
    "Probe",
    "Progress",
    "ProgressCallback",
    "QuantMethod",
    "QuantMethodSpec",
    "Registry",
    "ResolvedModel",
    "RotateAndWriteKV",
    "Routing",
    "SchedulerConnector",
    "StatLogger",
    "StatLoggerSpec",
    "StepSnapshot",
    "StorageTarget",
    "StorageTargetSpec",
    "StoreMatcher",
    "StoreTransfer",
    "StoredTensor",
    "StoredWeight",
    "SupportsExpiry",
    "SupportsGraphSizes",
    "SupportsGraphs",
    "SupportsHiddenTaps",
    "SupportsPlatformEncoders",
    "SupportsPrompt",
    "SupportsRead",
    "SupportsRouteTaps",
    "SupportsStaging",
    "SupportsTokenBytes",
    "SupportsWorkspace",
    "TapFacts",
    "Tokenizer",
    "TokenizerSpec",
    "Vocabulary",
    "WorkerConnector",
    "WriteKV",
    "build_registry",
    "check_matrix",
    "check_tensor",
    "hookimpl",
    "whole_rows",
]


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            value = getattr(import_module(f"infer.plugins.{module}"), name)
            globals()[name] = value  # the next access finds it without coming here
            return value
    raise AttributeError(f"module 'infer.plugins' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
