"""Every block type against gguf-py's dequantiser, on random bytes: all bit patterns of scales and quants occur."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES

from infer.weights.gguf import GGML_TYPES
from infer.weights.gguf_dequant import DECODERS, PLAIN_TYPES, dequantize

ALL_TYPES = sorted([*PLAIN_TYPES, *DECODERS])


def oracle(data: np.ndarray, type_name: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        result = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[type_name])
    return np.asarray(result, dtype=np.float32)


def assert_same_bits(ours: torch.Tensor, theirs: np.ndarray) -> None:
    """Bit-equal; of a NaN only that it is one (its payload has no meaning)."""
    mine = ours.float().numpy().reshape(theirs.shape)
    assert np.array_equal(np.isnan(mine), np.isnan(theirs))
    number = ~np.isnan(theirs)
    assert np.array_equal(mine.view(np.uint32)[number], theirs.view(np.uint32)[number])


@pytest.mark.row("LOAD-GGUF", "each block type dequantizes bit-equal to gguf-py's dequantize")
@pytest.mark.parametrize("type_name", ALL_TYPES)
def test_random_blocks_equal_gguf_py(type_name: str) -> None:
    nbytes = GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]][1]
    data = np.random.default_rng(len(type_name)).integers(0, 256, (997, nbytes), dtype=np.uint8)
    assert_same_bits(dequantize(torch.from_numpy(data.copy()).reshape(-1), type_name), oracle(data, type_name))


@pytest.mark.parametrize("type_name", sorted(DECODERS))
def test_infinite_nan_subnormal_and_negative_zero_scales(type_name: str) -> None:
    nbytes = GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]][1]
    data = np.random.default_rng(7).integers(0, 256, (64, nbytes), dtype=np.uint8)
    specials = np.array([0x7C00, 0xFC00, 0x7E00, 0xFE01, 0x0001, 0x8001, 0x8000, 0x0000], dtype=np.uint16)
    tails = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}
    heads = {"Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,)}
    for place, start in enumerate(tails.get(type_name) or heads.get(type_name) or (0, 2)):
        data[:, start : start + 2] = np.roll(np.repeat(specials, 8), 3 * place).view(np.uint8).reshape(-1, 2)
    expected = oracle(data, type_name)
    assert np.isnan(expected).any() and np.isinf(expected).any()
    assert_same_bits(dequantize(torch.from_numpy(data.copy()).reshape(-1), type_name), expected)


def test_type_table_equals_gguf_py() -> None:
    theirs = {int(kind): (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
    ours = {number: tuple(kind) for number, kind in GGML_TYPES.items()}
    assert {number: theirs.get(number) for number in ours} == ours
    assert all(
        nbytes == next(k.nbytes for k in GGML_TYPES.values() if k.name == name)
        for name, (nbytes, _) in DECODERS.items()
    )
