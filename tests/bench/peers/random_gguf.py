"""A llama of any shape with random weights in bf16, behind the tokenizer of another GGUF. For speed alone: it says nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

DRAWN = 1 << 20
"""Values drawn once and repeated: what a matmul costs does not depend on them."""


def write_random(
    tokenizer_of: Path, target: Path, hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int
) -> bool:
    """Write `target`; sizes as in a config.json. Embedding and head are one tensor."""
    reader = gguf.GGUFReader(str(tokenizer_of))
    writer = gguf.GGUFWriter(str(target), "llama")
    for name, field in reader.fields.items():
        if name.startswith("tokenizer."):
            _copy(writer, name, field)
    vocabulary = len(reader.fields["tokenizer.ggml.tokens"].data)
    writer.add_context_length(8192)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(intermediate)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_rope_freq_base(100_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocabulary)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    drawn = np.random.default_rng(0).standard_normal(DRAWN, dtype=np.float32) * hidden**-0.5
    bf16 = gguf.quants.quantize(drawn, gguf.GGMLQuantizationType.BF16)

    def matrix(name: str, rows: int, columns: int) -> None:
        values = np.resize(bf16.view(np.uint16), rows * columns).reshape(rows, columns)
        writer.add_tensor(name, values.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)

    def norm(name: str) -> None:
        writer.add_tensor(name, np.ones(hidden, dtype=np.float32))

    keys = hidden // heads * kv_heads
    matrix("token_embd.weight", vocabulary, hidden)
    norm("output_norm.weight")
    for layer in range(layers):
        norm(f"blk.{layer}.attn_norm.weight")
        norm(f"blk.{layer}.ffn_norm.weight")
        shapes = {"attn_q": (hidden, hidden), "attn_k": (keys, hidden), "attn_v": (keys, hidden)}
        shapes |= {"attn_output": (hidden, hidden), "ffn_down": (hidden, intermediate)}
        shapes |= {"ffn_gate": (intermediate, hidden), "ffn_up": (intermediate, hidden)}
        for name, (rows, columns) in shapes.items():
            matrix(f"blk.{layer}.{name}.weight", rows, columns)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return True


def _copy(writer: Any, name: str, field: Any) -> None:
    kind, *rest = field.types
    if kind == gguf.GGUFValueType.ARRAY:
        writer.add_array(name, field.contents())
    else:
        writer.add_key_value(name, field.contents(), kind)
    assert kind == gguf.GGUFValueType.ARRAY or not rest
