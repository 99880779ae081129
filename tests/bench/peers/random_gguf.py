"""A model of any shape with random weights in bf16, behind the tokenizer of another GGUF. For speed alone: it says nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

DRAWN = 1 << 20
"""Values drawn once and repeated: what a matmul costs does not depend on them."""


@dataclass(frozen=True)
class RandomModel:
    """Sizes as in a config.json. A llama; with experts a Qwen3-MoE, whose feed-forward layers are all of that kind."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    """Of one expert, where there are experts."""
    experts: int = 0
    chosen: int = 0
    """Experts per token."""

    @property
    def architecture(self) -> str:
        return "qwen3moe" if self.experts else "llama"

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def matrices(self) -> dict[str, tuple[int, ...]]:
        """Of one layer, by name; the inputs come last."""
        keys = self.head_dim * self.kv_heads
        stack = (self.experts,) if self.experts else ()
        suffix = "_exps" if self.experts else ""
        return {
            "attn_q": (self.hidden, self.hidden),
            "attn_k": (keys, self.hidden),
            "attn_v": (keys, self.hidden),
            "attn_output": (self.hidden, self.hidden),
            f"ffn_down{suffix}": (*stack, self.hidden, self.intermediate),
            f"ffn_gate{suffix}": (*stack, self.intermediate, self.hidden),
            f"ffn_up{suffix}": (*stack, self.intermediate, self.hidden),
        }

    def norms(self) -> dict[str, int]:
        per_head = {"attn_q_norm": self.head_dim, "attn_k_norm": self.head_dim} if self.experts else {}
        return {"attn_norm": self.hidden, "ffn_norm": self.hidden, **per_head}


def write_random(tokenizer_of: Path, target: Path, model: RandomModel) -> bool:
    """Write `target`. Embedding and head are one tensor."""
    reader = gguf.GGUFReader(str(tokenizer_of))
    writer = gguf.GGUFWriter(str(target), model.architecture)
    for name, field in reader.fields.items():
        if name.startswith("tokenizer."):
            _copy(writer, name, field)
    vocabulary = len(reader.fields["tokenizer.ggml.tokens"].data)
    _write_sizes(writer, model, vocabulary)
    draw = np.random.default_rng(0)
    drawn = draw.standard_normal(DRAWN, dtype=np.float32) * model.hidden**-0.5
    bf16 = gguf.quants.quantize(drawn, gguf.GGMLQuantizationType.BF16)

    def matrix(name: str, shape: tuple[int, ...]) -> None:
        values = np.resize(bf16.view(np.uint16), shape)
        writer.add_tensor(name, values.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)

    def norm(name: str, size: int) -> None:
        writer.add_tensor(name, np.ones(size, dtype=np.float32))

    matrix("token_embd.weight", (vocabulary, model.hidden))
    norm("output_norm.weight", model.hidden)
    for layer in range(model.layers):
        for name, size in model.norms().items():
            norm(f"blk.{layer}.{name}.weight", size)
        for name, shape in model.matrices().items():
            matrix(f"blk.{layer}.{name}.weight", shape)
        if model.experts:  # drawn anew, or all experts of a layer would be equally good
            router = draw.standard_normal((model.experts, model.hidden), dtype=np.float32)
            writer.add_tensor(f"blk.{layer}.ffn_gate_inp.weight", router * model.hidden**-0.5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return True


def _write_sizes(writer: Any, model: RandomModel, vocabulary: int) -> None:
    writer.add_context_length(8192)
    writer.add_embedding_length(model.hidden)
    writer.add_block_count(model.layers)
    writer.add_feed_forward_length(model.intermediate)
    writer.add_head_count(model.heads)
    writer.add_head_count_kv(model.kv_heads)
    writer.add_rope_dimension_count(model.head_dim)
    writer.add_rope_freq_base(100_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocabulary)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    if model.experts:
        writer.add_key_length(model.head_dim)
        writer.add_value_length(model.head_dim)
        writer.add_expert_count(model.experts)
        writer.add_expert_used_count(model.chosen)
        writer.add_expert_feed_forward_length(model.intermediate)


def _copy(writer: Any, name: str, field: Any) -> None:
    kind, *rest = field.types
    if kind == gguf.GGUFValueType.ARRAY:
        writer.add_array(name, field.contents())
    else:
        writer.add_key_value(name, field.contents(), kind)
    assert kind == gguf.GGUFValueType.ARRAY or not rest
