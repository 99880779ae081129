"""Tiny checkpoints with random weights: every kind of model in every form that weights come in, with the same numbers in fp32
beside them. Written once per directory; runs in the test's own thread."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gguf_samples import HALVES, quantized, to_llamacpp_order, write_gguf
from infer.models import deepseek_v2, gemma3, llama, qwen3_moe
from infer.plugins.model import GGUFNames
from integration.engine_support import BOS, EOS, VOCAB, write_checkpoint
from quantized_checkpoints import quantize_checkpoint

_SIZE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "tie_word_embeddings": False,
    "num_hidden_layers": 2,
    "dtype": "float32",
}
_LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
_WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
"""For block types that take 256 numbers."""
KINDS: dict[str, dict[str, Any]] = {
    "dense": llama.EXAMPLE | _SIZE,
    "window": gemma3.EXAMPLE | _SIZE,
    "moe": qwen3_moe.EXAMPLE | _SIZE | {"moe_intermediate_size": 64, "num_experts_per_tok": 2},
    "latent": deepseek_v2.EXAMPLE
    | {k: v for k, v in _SIZE.items() if k != "head_dim"}
    | _LATENT
    | {"moe_intermediate_size": 64},
}
"""Of the window 16 tokens, in one of two layers; the experts of "latent" are in one of two layers."""
GGUF_NAMES: dict[str, GGUFNames] = {
    "dense": llama.GGUF,
    "window": gemma3.GGUF,
    "moe": qwen3_moe.GGUF,
    # No llama.cpp file of this architecture is read; what is tested is that it says so.
    "latent": GGUFNames(
        arch="deepseek2",
        architecture="DeepseekV2ForCausalLM",
        config_keys={},
        tensors={"token_embd.weight": "model.embed_tokens.weight"},
    ),
}

TEMPLATE = (
    "{% if tools %}<tool_call>{% for tool in tools %}{{ tool.function.name }} {% endfor %}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Shows tools, in the format that the parser "hermes" reads."""


def _compressed(form: str, bits: int, strategy: str, **rule: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": strategy, **rule}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


SECTIONS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True},
    "gptq-order": {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    "w4a16": _compressed("pack-quantized", 4, "group", group_size=32),
    "w8a8": _compressed("int-quantized", 8, "channel"),
    "fp8": {"quant_method": "fp8", "activation_scheme": "static"},
    "fp8-block": {"quant_method": "fp8", "weight_block_size": [32, 48]},
}
"""quantization_config of checkpoints that other tools wrote."""
GGUF_TYPES = ("F16", "Q8_0", "Q4_0", "Q4_K", "Q6_K")
PLAIN = ("fp32", "bf16", "fp16")
AT_LOAD = ("int8", "int4")
WEIGHTS = (*PLAIN, *AT_LOAD, *(f"gguf-{name}" for name in GGUF_TYPES), *SECTIONS)


@dataclass(frozen=True)
class Shelf:
    """Checkpoints below one directory, each made when it is first asked for."""

    root: Path
    _made: dict[str, Path] = field(default_factory=dict)

    def path(self, kind: str, weights: str) -> Path:
        """What `model.ref` is set to."""
        if weights in ("fp32", *AT_LOAD):
            return self._once(f"{kind}-fp32", lambda at: _plain(at, KINDS[kind]))
        if weights in PLAIN:
            return self._once(f"{kind}-{weights}", lambda at: self._rounded(kind, weights, at))
        if weights in SECTIONS:
            return self._once(f"{kind}-{weights}", lambda at: self._quantized(kind, weights, at))
        return self._once(f"{kind}-{weights}.gguf", lambda at: self._gguf(kind, weights.removeprefix("gguf-"), at))

    def _once(self, name: str, make: Callable[[Path], Path]) -> Path:
        if name not in self._made:
            self._made[name] = make(self.root / name)
        return self._made[name]

    def _rounded(self, kind: str, weights: str, at: Path) -> Path:
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[weights]
        shutil.copytree(self.path(kind, "fp32"), at)
        stored = {name: tensor.to(dtype) for name, tensor in load_file(at / "model.safetensors").items()}
        save_file(stored, at / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((at / "config.json").read_text()) | {"dtype": str(dtype).removeprefix("torch.")}
        (at / "config.json").write_text(json.dumps(config))
        return at

    def _quantized(self, kind: str, weights: str, at: Path) -> Path:
        return quantize_checkpoint(self.path(kind, "fp32"), at, SECTIONS[weights])

    def _gguf(self, kind: str, type_name: str, at: Path) -> Path:
        config = KINDS[kind]
        if type_name in HALVES:
            config = config | _WIDE | ({"moe_intermediate_size": 256} if "moe_intermediate_size" in config else {})
            source = self._once(f"{kind}-wide", lambda wide: _plain(wide, config))
        else:
            source = self.path(kind, "fp32")
        weights = load_file(source / "model.safetensors")
        return write_gguf(
            at, _gguf_tensors(kind, config, weights, type_name), _metadata(kind, config, source), GGUF_NAMES[kind].arch
        )


def _plain(at: Path, config: dict[str, Any]) -> Path:
    write_checkpoint(at, config)
    file = at / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))
    return at


def _gguf_tensors(
    kind: str, config: dict[str, Any], weights: dict[str, Tensor], type_name: str
) -> dict[str, tuple[np.ndarray, str]]:
    names, found = GGUF_NAMES[kind], {}
    for short, long in names.tensors.items():
        for layer in range(config["num_hidden_layers"]) if "{i}" in short else (0,):
            name = long.replace("{i}", str(layer))
            if name.replace("{e}", "0") not in weights:
                continue
            experts = range(config["num_experts"]) if "{e}" in name else (0,)
            parts = [weights[name.replace("{e}", str(e))].float().numpy() for e in experts]
            for suffix, heads in names.permuted.items():
                if name.endswith(suffix):
                    parts = [to_llamacpp_order(part, config[heads]) for part in parts]
            found[short.replace("{i}", str(layer))] = _stored(parts, names, name, type_name, len(found))
    return found


def _stored(parts: list[np.ndarray], names: GGUFNames, name: str, type_name: str, seed: int) -> tuple[np.ndarray, str]:
    if parts[0].ndim == 1 or name.endswith("mlp.gate.weight"):
        offset = names.norm_offset if name.endswith("norm.weight") else 0.0
        return parts[0] + np.float32(offset), "F32"
    if type_name in HALVES:  # gguf-py does not write these: random blocks, whose numbers are about one
        parts = [
            _smaller(quantized((part.shape[0], part.shape[1]), type_name, seed + e), type_name)
            for e, part in enumerate(parts)
        ]
    return (np.stack(parts) if "{e}" in name else parts[0]), type_name


def _smaller(blocks: np.ndarray, type_name: str) -> np.ndarray:
    """An eighth of the numbers: sums of 256 of about one do not fit float16."""
    _, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    by_block = blocks.reshape(len(blocks), -1, num_bytes)
    for place in HALVES[type_name]:
        half = by_block[:, :, place : place + 2].copy().view(np.float16)
        by_block[:, :, place : place + 2] = (half / 8).view(np.uint8)
    return by_block.reshape(len(blocks), -1)


def _metadata(kind: str, config: dict[str, Any], source: Path) -> dict[str, Any]:
    names = GGUF_NAMES[kind]
    tokenizer = json.loads((source / "tokenizer.json").read_text())["model"]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in tokenizer["merges"]]
    special, normal = int(gguf.TokenType.CONTROL), int(gguf.TokenType.NORMAL)
    template = json.loads((source / "tokenizer_config.json").read_text())["chat_template"]
    return {
        "general.name": kind,
        **{f"{names.arch}.{key}": config[name] for name, key in names.config_keys.items() if name in config},
        f"{names.arch}.attention.value_length": config.get("head_dim", 16),
        f"{names.arch}.rope.dimension_count": config.get("head_dim", 16),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": sorted(tokenizer["vocab"], key=tokenizer["vocab"].get),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [special] * 3 + [normal] * (VOCAB - 3),
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": template,
    }
