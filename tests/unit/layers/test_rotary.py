"""Inverse frequencies against transformers, and angles against fp64."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from infer.backends.reference.platform import OPS
from infer.layers.rotary import RopeFacts, Rotary, inverse_frequencies
from infer.plugins.model import BuildContext
from infer.quantization.unquantized import UnquantizedMethod

CONTEXT = BuildContext(ops=OPS, dtype=torch.bfloat16, device=torch.device("cpu"), quant=UnquantizedMethod())


def oracle(head_size: int, **rope: object) -> torch.Tensor:
    config = LlamaConfig(hidden_size=4 * head_size, num_attention_heads=4, rope_parameters=rope)
    if rope["rope_type"] == "default":
        return LlamaRotaryEmbedding(config).inv_freq
    return ROPE_INIT_FUNCTIONS[str(rope["rope_type"])](config, "cpu")[0]


@pytest.mark.row("ATTN-ROPE-LLAMA3", "inverse frequencies equal transformers' within 1e-7 in all three bands")
@pytest.mark.parametrize(
    ("factor", "low", "high", "original"), [(8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192), (4.0, 2.0, 8.0, 1024)]
)
@pytest.mark.parametrize("head_size", [64, 128])
def test_llama3(head_size: int, factor: float, low: float, high: float, original: int) -> None:
    rope = RopeFacts(
        theta=500000.0,
        kind="llama3",
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=original,
    )
    expected = oracle(
        head_size,
        rope_type="llama3",
        rope_theta=500000.0,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=original,
    )
    got = inverse_frequencies(rope, head_size)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-7)
    ratio = inverse_frequencies(RopeFacts(theta=500000.0), head_size) / got
    kept, scaled = (ratio - 1).abs() < 1e-4, (ratio - factor).abs() < 1e-3
    assert kept.any() and scaled.any() and (~kept & ~scaled).any(), "the case must reach all three bands"


@pytest.mark.parametrize("theta", [10000.0, 1000000.0])
@pytest.mark.parametrize("head_size", [8, 64, 96])
def test_default_and_linear(head_size: int, theta: float) -> None:
    plain = inverse_frequencies(RopeFacts(theta=theta), head_size)
    torch.testing.assert_close(plain, oracle(head_size, rope_type="default", rope_theta=theta), rtol=0, atol=1e-7)
    linear = inverse_frequencies(RopeFacts(theta=theta, kind="linear", factor=4.0), head_size)
    expected = oracle(head_size, rope_type="linear", rope_theta=theta, factor=4.0)
    torch.testing.assert_close(linear, expected, rtol=0, atol=1e-7)


def test_a_share_of_the_head_may_be_rotated() -> None:
    expected = oracle(64, rope_type="linear", rope_theta=10000.0, factor=1.0, partial_rotary_factor=0.5)
    got = inverse_frequencies(RopeFacts(theta=10000.0, partial=0.5), 64)
    assert got.shape == (16,)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-7)


def test_angles_are_fp32_in_a_half_precision_model() -> None:
    positions = torch.tensor([0, 1, 77, 4095])
    cos, sin = Rotary(CONTEXT, RopeFacts(theta=10000.0), 16)(positions)
    assert cos.dtype == sin.dtype == torch.float32
    for row, position in enumerate(positions.tolist()):
        for i in range(8):
            angle = position * 10000.0 ** (-2 * i / 16)
            assert cos[row, i].item() == pytest.approx(math.cos(angle), abs=4e-4)
            assert sin[row, i].item() == pytest.approx(math.sin(angle), abs=4e-4)
