"""Small GGUF files for tests, written by gguf-py, and the Llama translation they are read with. No test in here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from infer.plugins.model import GGUFNames, ModelSpec

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

LLAMA_NAMES = GGUFNames(
    arch="llama",
    architecture="LlamaForCausalLM",
    config_keys={
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "max_position_embeddings": "context_length",
        "rms_norm_eps": "attention.layer_norm_rms_epsilon",
        "rope_theta": "rope.freq_base",
    },
    tensors={
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
        **{f"blk.{{i}}.{short}.weight": f"model.layers.{{i}}.{long}.weight" for short, long in _LAYER.items()},
        "blk.{i}.attn_q.bias": "model.layers.{i}.self_attn.q_proj.bias",
    },
    permuted={
        "self_attn.q_proj.weight": "num_attention_heads",
        "self_attn.k_proj.weight": "num_key_value_heads",
        "self_attn.q_proj.bias": "num_attention_heads",
    },
    fixed={"hidden_act": "silu", "model_type": "llama"},
)


def model_spec(names: GGUFNames | None = LLAMA_NAMES, architecture: str = "LlamaForCausalLM") -> ModelSpec:
    return ModelSpec(
        name=architecture,
        api=1,
        factory="nowhere:nothing",
        architectures=(architecture,),
        config_view="nowhere:nothing",
        gguf=names,
        example={},
    )


def to_llamacpp_order(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k: pair (j, j + half) of a head becomes neighbours."""
    half = weight.shape[0] // heads // 2
    rows = [head * 2 * half + part * half + j for head in range(heads) for j in range(half) for part in (0, 1)]
    return weight[rows]


def write_gguf(
    path: Path,
    tensors: dict[str, tuple[np.ndarray, str]],
    metadata: dict[str, Any] | None = None,
    arch: str = "llama",
) -> Path:
    """Tensors are (array, ggml type); for a type that gguf-py cannot quantise, the array holds the raw block bytes."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (metadata or {}).items():
        _add(writer, key, value)
    for name, (values, type_name) in tensors.items():
        kind = gguf.GGMLQuantizationType[type_name]
        if values.dtype != np.uint8:
            values = gguf.quants.quantize(values.astype(np.float32), kind)
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


HALVES = {
    "Q4_K": {0: 0.003, 2: 0.022},
    "Q5_K": {0: 0.0015, 2: 0.022},
    "Q6_K": {208: 0.001},
    "Q2_K": {80: 0.1, 82: 0.15},
    "Q3_K": {108: 0.03},
}
"""Types that gguf-py reads and does not write: where their fp16 numbers lie in a block, and how large they may be for
weights of about one, of both signs."""


def quantized(shape: tuple[int, int], type_name: str, seed: int = 0) -> np.ndarray:
    """Raw blocks of random weights of about one, uint8 [rows, bytes of a row]: quantised normal numbers, or random blocks
    of the types in `HALVES`."""
    random = np.random.default_rng(seed)
    kind = gguf.GGMLQuantizationType[type_name]
    if type_name not in HALVES:
        return gguf.quants.quantize(random.standard_normal(shape, dtype=np.float32), kind)
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (shape[0], shape[1] // size, num_bytes), dtype=np.uint8)
    for place, largest in HALVES[type_name].items():
        half = random.uniform(0.1 * largest, largest, blocks.shape[:2]).astype(np.float16)
        blocks[:, :, place : place + 2] = half[..., None].view(np.uint8)
    return blocks.reshape(shape[0], -1)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value) if value >= 0 else writer.add_int32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


LLAMA_METADATA: dict[str, Any] = {
    "llama.block_count": 1,
    "llama.context_length": 128,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "llama.rope.dimension_count": 16,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": [f"tök{i}" for i in range(32)],
    "tokenizer.ggml.token_type": [1] * 32,
    "tokenizer.ggml.scores": [0.5] * 32,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.add_bos_token": False,
}


def llama_weights(seed: int = 0) -> dict[str, np.ndarray]:
    """The Hugging Face tensors of a one-layer Llama that fits `LLAMA_METADATA`."""
    random = np.random.default_rng(seed)
    shapes = {
        "model.embed_tokens.weight": (32, 64),
        "model.norm.weight": (64,),
        "model.layers.0.input_layernorm.weight": (64,),
        "model.layers.0.post_attention_layernorm.weight": (64,),
        "model.layers.0.self_attn.q_proj.weight": (64, 64),
        "model.layers.0.self_attn.k_proj.weight": (32, 64),
        "model.layers.0.self_attn.v_proj.weight": (32, 64),
        "model.layers.0.self_attn.o_proj.weight": (64, 64),
        "model.layers.0.mlp.gate_proj.weight": (96, 64),
        "model.layers.0.mlp.up_proj.weight": (96, 64),
        "model.layers.0.mlp.down_proj.weight": (64, 96),
    }
    return {name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def llama_tensors(weights: dict[str, np.ndarray], type_name: str = "F32") -> dict[str, tuple[np.ndarray, str]]:
    """The same weights under GGUF names, in llama.cpp's row order; vectors stay F32."""
    stored = {}
    for short, long in LLAMA_NAMES.tensors.items():
        name = long.replace("{i}", "0")
        if name not in weights:
            continue
        value = weights[name]
        heads = {"q_proj.weight": 4, "k_proj.weight": 2}.get(name.rsplit(".", 2)[-2] + ".weight")
        if heads:
            value = to_llamacpp_order(value, heads)
        stored[short.replace("{i}", "0")] = (value, type_name if value.ndim > 1 else "F32")
    return stored


def write_llama(path: Path, type_name: str = "F32", **metadata: Any) -> Path:
    """A one-layer Llama in one file; keyword arguments replace metadata ("." written as "__")."""
    extra = {key.replace("__", "."): value for key, value in metadata.items()}
    return write_gguf(path, llama_tensors(llama_weights(), type_name), {**LLAMA_METADATA, **extra})


def write_block_llama(path: Path, type_name: str) -> Path:
    """As `write_llama`, 256 wide, its matrices `quantized` blocks of any type."""
    sizes = {"embedding_length": 256, "feed_forward_length": 256, "rope.dimension_count": 64}
    random = np.random.default_rng(0)
    tensors: dict[str, tuple[np.ndarray, str]] = {}
    for index, (name, (value, _)) in enumerate(llama_tensors(llama_weights()).items()):
        if value.ndim == 1:
            # Scores and logits of a few units: a softmax that is not all on one place.
            scale = {"blk.0.attn_norm.weight": 0.1, "output_norm.weight": 0.25}.get(name, 1.0)
            tensors[name] = (scale * random.standard_normal(256, dtype=np.float32), "F32")
        else:
            rows = 32 if name == "token_embd.weight" else 128 if "attn_k" in name or "attn_v" in name else 256
            tensors[name] = (quantized((rows, 256), type_name, index), type_name)
    return write_gguf(path, tensors, {**LLAMA_METADATA, **{f"llama.{key}": value for key, value in sizes.items()}})
