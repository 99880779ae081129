"""Facts read from a checkpoint. Plain data; nothing here was asked for or decided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from infer.config.capture import CaptureProfile


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What generation_config.json says; None or empty where it is silent."""

    values: dict[str, Any] = msgspec.field(default_factory=dict)
    """Sampling fields under `SamplingParams` names, e.g. {"temperature": 0.6, "top_p": 0.9}."""
    eos_token_ids: tuple[int, ...] = ()


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint's facts. `raw` is config.json (for a GGUF: translated to its keys); each model file has a typed view of it."""

    path: Path
    """Directory or .gguf file."""
    format: str
    """"safetensors" or "gguf"."""
    architecture: str
    identity: str
    """Content identity; root of the KV hash chain."""
    vocab_size: int
    max_position: int
    """Context the checkpoint was made for, in tokens: what it was trained with, or what yarn extends that to."""
    dtype: str
    """Checkpoint dtype: "bfloat16", "float16" or "float32" (for a quantised GGUF "bfloat16")."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    quantization: dict[str, Any] | None
    """The checkpoint's quantization section, e.g. {"quant_method": "gguf"}; None when weights are plain."""
    generation: GenerationDefaults
    raw: dict[str, Any]
    stored_types: dict[str, str] = msgspec.field(default_factory=dict)
    """Tensor name -> block type ("Q4_1") of what a GGUF stores quantised."""


class KVGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers whose KV shares one block table."""

    name: str
    layer_ids: tuple[int, ...]
    window: int | None = None
    """Sliding window in tokens; blocks wholly outside it are given back."""


class KVLayer(msgspec.Struct, frozen=True, kw_only=True):
    """Cache shape of one attention layer: keys are [blocks, block_size, num_kv_heads, head_size], values likewise."""

    layer_id: int
    num_kv_heads: int
    head_size: int
    value_head_size: int | None = None
    """None: values are as wide as keys."""

    @property
    def head_sizes(self) -> tuple[int, int]:
        """Of the keys and of the values."""
        return self.head_size, self.head_size if self.value_head_size is None else self.value_head_size


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """What the runner allocates. No groups: a model without attention."""

    groups: tuple[KVGroup, ...]
    layers: tuple[KVLayer, ...]


class RoutedLayer(msgspec.Struct, frozen=True, kw_only=True):
    """A layer that sends each token to some of its experts."""

    layer_id: int
    """0-based decoder layer."""
    num_experts: int
    top_k: int


class StepBounds(msgspec.Struct, frozen=True, kw_only=True):
    """The largest step there can be."""

    num_tokens: int
    num_rows: int
    """Sequences; slots of the persistent batch."""
    max_model_len: int
    """Longest sequence."""


class ModelFootprint(msgspec.Struct, frozen=True, kw_only=True):
    """What the model will occupy, computed from headers and shapes before any weight is read."""

    weight_bytes: int
    """Bytes of the parameters as they will live in memory."""
    load_transient_bytes: int
    """Extra bytes at the peak of loading (largest tensor in flight)."""
    workspace_bytes: int
    """Of the worst step within `bounds`, the sampler and the slots' rows included."""
    bounds: StepBounds
    kv_layout: KVLayout
    captures: tuple[CaptureProfile, ...] = ()
    """Artifact fields that the settings turn on, as this model gives them."""
    notices: tuple[str, ...] = ()
    """What the operator should know about the form of the weights."""
