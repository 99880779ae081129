"""From a checkpoint's facts to the opened checkpoint of its format. Worker thread, blocking; owns nothing."""

from __future__ import annotations

from collections.abc import Iterable

from infer.config.model import ModelConfig
from infer.errors import UnsupportedModelError
from infer.plugins.model import ModelSpec
from infer.weights.checkpoint import Checkpoint
from infer.weights.facts import gguf_names
from infer.weights.gguf_checkpoint import GGUFCheckpoint
from infer.weights.safetensors import SafetensorsCheckpoint


def open_checkpoint(config: ModelConfig, models: Iterable[ModelSpec]) -> Checkpoint:
    """Open what `config.path` names. Reads headers only; raises `WeightError` when the files are damaged."""
    if config.format == "gguf":
        return GGUFCheckpoint(config.path, gguf_names(config.architecture, models))
    if config.format == "safetensors":
        return SafetensorsCheckpoint(config.path)
    raise UnsupportedModelError(f"{config.path} has the format {config.format!r}; safetensors and gguf are read")
