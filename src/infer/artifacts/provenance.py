"""Where a generation comes from, as its artifact says it: model, numerics, versions, how it was sampled. Pure.

But for `tokenizer_digest`, which reads a file.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import msgspec
from pydantic import BaseModel

from infer.artifacts.record import Numerics, Provenance, SamplingValue, Scalar
from infer.config.model import ModelConfig
from infer.config.resolve import ResolvedConfig
from infer.options import processor_label
from infer.types import SamplingParams

_RETURNED = frozenset({"return_routed_experts", "routed_experts_prompt_start", "captured_as"})
"""Parameters that say what the response holds, not how it was sampled."""


def engine_provenance(model: ModelConfig, resolved: ResolvedConfig, template_digest: str = "") -> Provenance:
    """What is the same for all requests of an engine."""
    return Provenance(
        model=model.identity,
        template_digest=template_digest,
        engine_version=importlib.metadata.version("infer-engine"),
        numerics=Numerics(
            mode=resolved.numerics,
            platform=resolved.platform,
            kernel_fingerprint=resolved.kernel_fingerprint,
            compute_dtype=resolved.dtype,
            weights_dtype=resolved.quantization or _weights_dtype(model, resolved.dtype),
            kv_dtype=resolved.cache.dtype,
        ),
    )


def with_sampling(known: Provenance, params: SamplingParams, max_tokens: int) -> Provenance:
    """For one request: its parameters as in force."""
    sampling: dict[str, SamplingValue] = {}
    for name in sorted(set(type(params).model_fields) - _RETURNED):
        value = getattr(params, name)
        if name == "logits_processors":
            value = [processor_label(processor) for processor in params.logits_processors]
        if isinstance(value, BaseModel):
            value = value.model_dump(mode="json", exclude_none=True)
        if isinstance(value, dict):
            value = {str(key): _scalar(item) for key, item in value.items()}
        elif isinstance(value, list):
            value = tuple(value)
        if value is not None:
            sampling[name] = value
    sampling["max_tokens"] = max_tokens
    return msgspec.structs.replace(known, sampling=sampling, logprobs_mode=params.logprobs_mode)


def _scalar(value: Any) -> Scalar:
    """Maps hold nothing deeper: the choices of a constrained answer are JSON text."""
    return value if isinstance(value, Scalar) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def tokenizer_digest(path: Path | None) -> str:
    """SHA-256 of a tokenizer.json; empty where the tokenizer is kept in another way. Reads the file."""
    file = path / "tokenizer.json" if path is not None and path.is_dir() else path
    if file is None or file.suffix != ".json":
        return ""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return ""


def text_digest(text: str | dict[str, str] | None) -> str:
    """SHA-256 of a chat template, or of several by name."""
    if not text:
        return ""
    parts = [text] if isinstance(text, str) else [f"{name}\0{text[name]}" for name in sorted(text)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _weights_dtype(model: ModelConfig, dtype: str) -> str:
    """As stored: block types of a GGUF, the method of another quantised checkpoint, else what they are computed in."""
    if model.stored_types:
        return ",".join(sorted(set(model.stored_types.values())))
    method = (model.quantization or {}).get("quant_method")
    return str(method) if method else dtype
