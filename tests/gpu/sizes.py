"""How large everything is, on a GPU and in a dry run. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

DENSE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""The shape of Llama 3.2 1B with a smaller vocabulary: 1.1 billion parameters."""
SPARSE: dict[str, Any] = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 512,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_hidden_layers": 48,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""As deep as the sparse models that people serve, with small layers: 1.3 billion parameters."""
_SMALL = {"vocab_size": 160, "hidden_size": 32, "intermediate_size": 64, "torch_dtype": "float32"}
_FEW_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    dense: dict[str, Any]
    """config.json of the dense model."""
    sparse: dict[str, Any]
    copy_bytes: int
    matmul_side: int
    max_num_seqs: int
    """Of engines whose results are compared."""
    num_requests: int
    """So many come and go."""
    prompt_len: int
    max_tokens: int
    decode_batches: tuple[int, ...]
    """Of decode figures."""
    decode_tokens: int
    prefill_len: int
    prefill_prompts: int
    trace_steps: int
    cache_blocks: int
    hidden: int
    """Of kernel figures, as the following."""
    heads: int
    kv_heads: int
    head_size: int
    context: int
    tokens: int
    """Of a large chunk."""
    rows: int
    """Of a decode step."""
    experts: int
    expert_size: int
    vocab: int


REAL = Sizes(
    dense=DENSE,
    sparse=SPARSE,
    copy_bytes=1 << 30,
    matmul_side=8192,
    max_num_seqs=32,
    num_requests=240,
    prompt_len=200,
    max_tokens=48,
    decode_batches=(1, 16, 64),
    decode_tokens=128,
    prefill_len=4096,
    prefill_prompts=4,
    trace_steps=100,
    cache_blocks=6000,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_size=128,
    context=4096,
    tokens=4096,
    rows=64,
    experts=64,
    expert_size=1024,
    vocab=128256,
)
TINY = Sizes(
    dense=DENSE | _SMALL | _FEW_HEADS | {"num_hidden_layers": 2},
    sparse=SPARSE
    | _SMALL
    | _FEW_HEADS
    | {
        "num_hidden_layers": 3,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    copy_bytes=1 << 16,
    matmul_side=32,
    max_num_seqs=4,
    num_requests=7,
    prompt_len=20,
    max_tokens=5,
    decode_batches=(1, 2),
    decode_tokens=4,
    prefill_len=48,
    prefill_prompts=2,
    trace_steps=4,
    cache_blocks=128,
    hidden=32,
    heads=4,
    kv_heads=2,
    head_size=16,
    context=40,
    tokens=5,
    rows=3,
    experts=4,
    expert_size=32,
    vocab=200,
)
