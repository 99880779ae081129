"""The public names of `infer`, each imported when it is first used.

Owns nothing: importing the package reads no environment, resolves no plugin and loads no tensor library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infer.answer import ParsedAnswer, ToolCall
    from infer.config.engine import EngineConfig
    from infer.engine.engine import Engine
    from infer.errors import (
        ArtifactCorruptError,
        ArtifactError,
        ArtifactFieldMissingError,
        ArtifactRefusedError,
        CapturedBlockMissingError,
        ConfigError,
        ContextLengthError,
        EngineClosedError,
        EngineDeadError,
        EngineError,
        GrammarError,
        InferError,
        InvalidRequestError,
        KVLoadError,
        ModelError,
        PluginConflictError,
        PluginContractError,
        PluginError,
        PluginLoadError,
        QueueFullError,
        RequestError,
        SamplingError,
        StepError,
        StepLogError,
        StorageError,
        StorageNotFoundError,
        StorageUnavailableError,
        UnknownPluginError,
        UnsupportedModelError,
        WeightError,
    )
    from infer.options import BeamSearch, NamedProcessor, RepetitionDetection
    from infer.structured import StructuredOutput
    from infer.types import (
        CapturedRows,
        Choice,
        Completion,
        Delta,
        RequestTimings,
        SamplingParams,
        TokenLogprob,
        Usage,
    )

    __version__: str

__all__ = [
    "ArtifactCorruptError",
    "ArtifactError",
    "ArtifactFieldMissingError",
    "ArtifactRefusedError",
    "BeamSearch",
    "CapturedBlockMissingError",
    "CapturedRows",
    "Choice",
    "Completion",
    "ConfigError",
    "ContextLengthError",
    "Delta",
    "Engine",
    "EngineClosedError",
    "EngineConfig",
    "EngineDeadError",
    "EngineError",
    "GrammarError",
    "InferError",
    "InvalidRequestError",
    "KVLoadError",
    "ModelError",
    "NamedProcessor",
    "ParsedAnswer",
    "PluginConflictError",
    "PluginContractError",
    "PluginError",
    "PluginLoadError",
    "QueueFullError",
    "RepetitionDetection",
    "RequestError",
    "RequestTimings",
    "SamplingError",
    "SamplingParams",
    "StepError",
    "StepLogError",
    "StorageError",
    "StorageNotFoundError",
    "StorageUnavailableError",
    "StructuredOutput",
    "TokenLogprob",
    "ToolCall",
    "UnknownPluginError",
    "UnsupportedModelError",
    "Usage",
    "WeightError",
    "__version__",
]


def _home(name: str) -> str:
    """The module that defines a public name."""
    if name == "Engine":
        return "infer.engine.engine"
    if name == "EngineConfig":
        return "infer.config.engine"
    if name in ("BeamSearch", "NamedProcessor", "RepetitionDetection"):
        return "infer.options"
    if name in ("ParsedAnswer", "ToolCall"):
        return "infer.answer"
    if name == "StructuredOutput":
        return "infer.structured"
    return "infer.errors" if name.endswith("Error") else "infer.types"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'infer' has no attribute {name!r}")
    if name == "__version__":
        value: Any = import_module("importlib.metadata").version("infer-engine")
    else:
        value = getattr(import_module(_home(name)), name)
    globals()[name] = value  # the next access finds it without coming here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
