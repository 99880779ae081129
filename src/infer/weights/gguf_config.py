"""A GGUF's metadata as the `config.json` it was converted from, so that a model file has one description to read.

Any thread, no tensor library. Pure functions over an opened `GGUFFile`.
"""

from __future__ import annotations

import math
import struct
from typing import Any

from infer.errors import ModelError, UnsupportedModelError, WeightError
from infer.plugins.model import GGUFNames
from infer.weights.gguf import GGUFFile

ROPE_FACTORS = "rope_freqs.weight"
"""llama.cpp's divisors of the rotary frequencies: Llama 3 scaling, precomputed. Read here, so loading skips it."""
QUANTIZED_DTYPE = "bfloat16"
EMBEDDING = "token_embd.weight"
_PLAIN_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_TOKEN_IDS = {"bos_token_id": "bos_token_id", "pad_token_id": "padding_token_id", "unk_token_id": "unknown_token_id"}
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_YARN_KEYS = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
_NEUTRAL_SCALING = {"attn_factor": 1.0, "yarn_log_multiplier": 0.0}
"""llama.cpp multiplies by the first what converters write as the whole factor: which is meant cannot be told."""


def gguf_config(file: GGUFFile, names: GGUFNames) -> dict[str, Any]:
    """The config.json-like dict. What the file says wins over `names.fixed`; a key in neither is left out, and the
    model's own config view refuses what it cannot do without."""
    config: dict[str, Any] = dict(names.fixed)
    config["architectures"] = [names.architecture]
    for key, suffix in names.config_keys.items():
        value = _uniform(file, f"{names.arch}.{suffix}")
        if value is not None:
            config[key] = value
    if "num_key_value_heads" not in config and "num_attention_heads" in config:
        config["num_key_value_heads"] = config["num_attention_heads"]
    _set_head_dim(config, file, names.arch)
    _set_token_ids(config, file)
    config["vocab_size"] = vocab_size(file, names.arch)
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config["torch_dtype"] = stored_dtype(file)
    window = integer(file, f"{names.arch}.attention.sliding_window")
    if window:
        config.setdefault("sliding_window", window)
    scaling = _rope_scaling(config, file, names.arch)
    if scaling is not None:
        config["rope_scaling"] = scaling
    return config


def integer(file: GGUFFile, key: str) -> int | None:
    """An integer of the metadata; None when absent. Raises `ModelError` when it is something else."""
    value = file.metadata.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise ModelError(f"{file.path}: metadata key {key!r} is {value!r:.80}, not an integer")
    return value


def number(file: GGUFFile, key: str) -> float | None:
    """A finite number of the metadata; None when absent."""
    value = file.metadata.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ModelError(f"{file.path}: metadata key {key!r} is {value!r:.80}, not a finite number")
    return float(_shortest(value))


def vocab_size(file: GGUFFile, arch: str) -> int:
    """Rows of the embedding (which may be padded), else the tokenizer's size, else what the metadata claims."""
    tokens = file.metadata.array_length("tokenizer.ggml.tokens")
    embedding = file.tensors.get(EMBEDDING)
    if embedding is not None:
        if tokens is not None and tokens > embedding.shape[0]:
            raise WeightError(
                f"{file.path}: the tokenizer has {tokens} tokens, but {EMBEDDING} only {embedding.shape[0]} rows",
                tensor=EMBEDDING,
            )
        return embedding.shape[0]
    size = tokens if tokens is not None else integer(file, f"{arch}.vocab_size")
    if size is None:
        raise ModelError(f"{file.path} says nowhere how large its vocabulary is (tokenizer.ggml.tokens is missing)")
    return size


def is_quantized(file: GGUFFile) -> bool:
    return any(len(tensor.shape) > 1 and tensor.type.name not in _PLAIN_DTYPES for tensor in file.tensors.values())


def stored_dtype(file: GGUFFile) -> str:
    """The dtype that most matrix bytes are stored in; "bfloat16" when blocks are quantised."""
    if is_quantized(file):
        return QUANTIZED_DTYPE
    totals: dict[str, int] = {}
    for tensor in file.tensors.values():
        name = _PLAIN_DTYPES.get(tensor.type.name)
        if name is not None and len(tensor.shape) > 1:
            totals[name] = totals.get(name, 0) + tensor.nbytes
    return max(totals, key=lambda name: totals[name], default=QUANTIZED_DTYPE)


def eos_token_ids(file: GGUFFile) -> tuple[int, ...]:
    """End of text, of turn and of message, as far as the file names them, without repetition."""
    found = (integer(file, f"tokenizer.ggml.{key}") for key in _EOS_KEYS)
    return tuple(dict.fromkeys(token_id for token_id in found if token_id is not None))


def _shortest(value: float) -> float:
    """Metadata floats are fp32: the shortest decimal with the same fp32 value is what config.json said (1e-05)."""
    if isinstance(value, int) or not math.isfinite(value):
        return value
    for digits in range(6, 10):
        candidate = float(f"{value:.{digits}g}")
        try:
            if struct.unpack("<f", struct.pack("<f", candidate))[0] == value:
                return candidate
        except OverflowError:  # an fp64 value beyond fp32
            break
    return value


def _uniform(file: GGUFFile, key: str) -> Any:
    """A metadata value; a per-layer array of equal numbers counts as that number."""
    value = file.metadata.get(key)
    if isinstance(value, list) and value and not isinstance(value[0], str) and all(v == value[0] for v in value):
        value = value[0]
    if isinstance(value, float):
        return number(file, key) if not isinstance(file.metadata[key], list) else _shortest(value)
    return value


def _set_head_dim(config: dict[str, Any], file: GGUFFile, arch: str) -> None:
    key_length = integer(file, f"{arch}.attention.key_length")
    value_length = integer(file, f"{arch}.attention.value_length")
    if key_length is not None and value_length is not None and key_length != value_length:
        raise UnsupportedModelError(
            f"{file.path}: keys have {key_length} and values {value_length} elements per head; they must be equal"
        )
    if key_length is not None:
        config["head_dim"] = key_length
    elif "head_dim" not in config:
        hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
        if isinstance(hidden, int) and isinstance(heads, int) and heads > 0 and hidden % heads == 0:
            config["head_dim"] = hidden // heads
    rotary = integer(file, f"{arch}.rope.dimension_count")
    if rotary is not None and config.get("head_dim") and rotary != config["head_dim"]:
        config["partial_rotary_factor"] = rotary / config["head_dim"]


def _set_token_ids(config: dict[str, Any], file: GGUFFile) -> None:
    for key, suffix in _TOKEN_IDS.items():
        value = integer(file, f"tokenizer.ggml.{suffix}")
        if value is not None:
            config[key] = value
    eos = eos_token_ids(file)
    if eos:
        config["eos_token_id"] = eos[0] if len(eos) == 1 else list(eos)


def _rope_scaling(config: dict[str, Any], file: GGUFFile, arch: str) -> dict[str, Any] | None:
    kind = file.metadata.get(f"{arch}.rope.scaling.type")
    factors = _rope_factors(file)
    if factors is not None:
        return _llama3_scaling(config, file, factors)
    factor = number(file, f"{arch}.rope.scaling.factor")
    if kind is None:  # files of 2023 gave only the linear factor
        factor = number(file, f"{arch}.rope.scale_linear") if factor is None else factor
        kind = "none" if factor in (None, 0.0, 1.0) else "linear"
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(
            f"{file.path}: rope scaling of type {kind!r:.80} is not supported (linear and yarn are)"
        )
    if factor is None or factor <= 0:
        raise ModelError(f"{file.path}: {arch}.rope.scaling.factor is {factor}, a positive number is needed")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    original = integer(file, f"{arch}.rope.scaling.original_context_length")
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    for suffix, neutral in _NEUTRAL_SCALING.items():
        value = number(file, f"{arch}.rope.scaling.{suffix}")
        if value not in (None, neutral):
            raise UnsupportedModelError(
                f"{file.path}: {arch}.rope.scaling.{suffix}={value} is not supported, only {neutral}"
            )
    for key, suffix in _YARN_KEYS.items():
        value = number(file, f"{arch}.rope.scaling.{suffix}")
        if value is not None:
            scaling[key] = value
    return scaling


def _rope_factors(file: GGUFFile) -> tuple[float, ...] | None:
    """The values of rope_freqs.weight; None when absent or all 1 (no scaling)."""
    tensor = file.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return None
    if tensor.type.name != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > 4096:
        raise UnsupportedModelError(
            f"{file.path}: {ROPE_FACTORS} is {tensor.type.name} {tensor.shape}, not a short F32 row"
        )
    raw = bytearray(tensor.nbytes)
    file.read_into(tensor, 0, memoryview(raw))
    factors: tuple[float, ...] = struct.unpack(f"<{tensor.shape[0]}f", raw)
    return None if all(factor == 1.0 for factor in factors) else factors


def _llama3_scaling(config: dict[str, Any], file: GGUFFile, factors: tuple[float, ...]) -> dict[str, Any]:
    """Find the Llama 3 parameters that give exactly these factors; the file keeps only their result.

    Every published Llama 3 uses low_freq_factor 1 and high_freq_factor 4; the original context is a power of two.
    Several contexts may fit (they differ only beyond the slowest frequency): the largest common one, 8192, goes first.
    """
    theta, head_dim = config.get("rope_theta", 10000.0), config.get("head_dim")
    if not isinstance(theta, int | float) or not 1 <= theta < math.inf or head_dim != 2 * len(factors):
        raise ModelError(
            f"{file.path}: {ROPE_FACTORS} has {len(factors)} elements; with head_dim {head_dim} and rope_theta {theta} "
            "it cannot be Llama 3 scaling"
        )
    candidate = {"rope_type": "llama3", "factor": max(factors), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    originals = (8192, *(1 << power for power in range(5, 21))) if 1 < max(factors) < math.inf else ()
    for original in originals:
        scaling = {**candidate, "original_max_position_embeddings": original}
        expected = _llama3_factors(theta, head_dim, scaling)
        if all(abs(want - have) <= 1e-4 * abs(want) for want, have in zip(expected, factors, strict=True)):
            return scaling
    raise UnsupportedModelError(
        f"{file.path}: {ROPE_FACTORS} scales the rotary frequencies in a way that is not Llama 3's "
        f"(factor {max(factors):g}, low 1, high 4); no other table is supported"
    )


def _llama3_factors(theta: float, head_dim: int, scaling: dict[str, Any]) -> list[float]:
    """Divisor of each rotary frequency (Llama 3.1 reference code, `apply_scaling`)."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    result = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (index / head_dim)
        smooth = (original / wavelength - low) / (high - low)
        smooth = min(max(smooth, 0.0), 1.0)
        result.append(1 / ((1 - smooth) / factor + smooth))
    return result
