"""Inverse frequencies against transformers, and angles against fp64."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from infer.backends.reference.platform import OPS
from infer.layers.facts import Facts
from infer.layers.rotary import RopeFacts, Rotary, inverse_frequencies
from infer.plugins.model import BuildContext
from infer.quantization.unquantized import UnquantizedMethod

CONTEXT = BuildContext(ops=OPS, dtype=torch.bfloat16, device=torch.device("cpu"), quant=UnquantizedMethod())


def facts(raw: dict[str, Any]) -> Facts:
    return Facts(cast(Any, SimpleNamespace(raw=raw, architecture="X", max_position=raw["max_position_embeddings"])))


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


YARNS: dict[str, dict[str, Any]] = {
    "plain": {"factor": 4.0, "original_max_position_embeddings": 32768},
    "deepseek-v3": {"factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0},
    "deepseek-v2": {"factor": 40, "original_max_position_embeddings": 4096, "mscale": 0.707, "mscale_all_dim": 0.9},
    "one mscale alone": {"factor": 8.0, "original_max_position_embeddings": 4096, "mscale_all_dim": 0.707},
    "betas": {"factor": 16.0, "original_max_position_embeddings": 2048, "beta_fast": 24, "beta_slow": 2.5},
    "betas of zero": {"factor": 16.0, "original_max_position_embeddings": 2048, "beta_fast": 0, "beta_slow": 0},
    "not truncated": {"factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
    "attention factor": {"factor": 4.0, "original_max_position_embeddings": 4096, "attention_factor": 0.75},
    "no trained length": {"factor": 4.0},
    "no factor": {"factor": None, "original_max_position_embeddings": 1024},
    "short, all scaled": {"factor": 2.0, "original_max_position_embeddings": 4},
    "factor below one": {"factor": 0.5, "original_max_position_embeddings": 4096},
}


@pytest.mark.row("ATTN-YARN", "cos and sin equal transformers' within 1e-6")
@pytest.mark.parametrize("name", YARNS)
@pytest.mark.parametrize(("head_size", "theta"), [(64, 10000.0), (128, 1000000.0), (4, 10000.0)])
def test_yarn(name: str, head_size: int, theta: float) -> None:
    """From config.json's section to cos and sin, against transformers' rotary module."""
    section = YARNS[name] | {"rope_type": "yarn"}
    raw = {"max_position_embeddings": 65536, "rope_theta": theta, "rope_scaling": dict(section)}
    rope = facts(raw).rope(theta=1.0)
    config = LlamaConfig(hidden_size=4 * head_size, num_attention_heads=4, **copy.deepcopy(raw))
    module = LlamaRotaryEmbedding(config)
    assert torch.equal(inverse_frequencies(rope, head_size), module.inv_freq)
    positions = torch.arange(0, raw["max_position_embeddings"], 7)
    expected = module(torch.empty(1, dtype=torch.float32), positions[None])
    for got, table in zip(Rotary(CONTEXT, rope, head_size)(positions), expected, strict=True):
        torch.testing.assert_close(got, table[0, :, : head_size // 2], rtol=0, atol=1e-6)


def test_yarn_reads_the_trained_length_of_old_configs() -> None:
    """Beside the section it wins over the one in it, as in transformers."""
    section = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    raw = {"max_position_embeddings": 65536, "original_max_position_embeddings": 1024, "rope_theta": 10000.0}
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, rope_scaling=dict(section), **raw)
    rope = facts(raw | {"rope_scaling": section}).rope(theta=10000.0)
    assert rope.original_max_position == 1024
    torch.testing.assert_close(inverse_frequencies(rope, 64), LlamaRotaryEmbedding(config).inv_freq, rtol=0, atol=1e-7)


def test_deepseek_scales_attention_with_the_context() -> None:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale

    for rest in ({"rope_type": "yarn", "mscale_all_dim": 0.8}, {"rope_type": "yarn"}, {"rope_type": "default"}):
        section = {"factor": 40.0, "original_max_position_embeddings": 4096} | rest
        rope = facts({"max_position_embeddings": 163840, "rope_scaling": section}).rope(theta=10000.0)
        assert rope.scale_multiplier == pytest.approx(yarn_apply_mscale(section, 1.0), rel=1e-12)


def test_dynamic_changes_nothing_within_the_trained_length() -> None:
    raw = {"max_position_embeddings": 2048, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}
    rope = facts(raw).rope(theta=10000.0)
    expected = oracle(64, rope_type="dynamic", rope_theta=10000.0, factor=4.0)
    torch.testing.assert_close(inverse_frequencies(rope, 64), expected, rtol=0, atol=1e-7)


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
