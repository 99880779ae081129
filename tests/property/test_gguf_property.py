"""Damaged GGUFs: any truncation, flipped bytes or spliced numbers give a typed error or a good read, never anything else."""

from __future__ import annotations

import struct
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_samples import LLAMA_METADATA, llama_tensors, llama_weights, model_spec, write_gguf
from infer.errors import ModelError
from infer.weights.facts import read_model_config
from infer.weights.gguf import GGUFFile
from infer.weights.gguf_dequant import DECODERS, PLAIN_TYPES, dequantize
from infer.weights.opening import open_checkpoint

SPECS = [model_spec()]
LIVENESS = pytest.mark.timeout(120)
FUZZ = settings(max_examples=max(400, settings.default.max_examples if settings.default else 0))


@cache
def valid_file() -> bytes:
    """Every kind of metadata, plain and quantised tensors, Llama 3 rope factors."""
    tensors = llama_tensors(llama_weights(), "Q8_0")
    tensors["output.weight"] = (np.zeros((32, 64), np.float32), "F16")
    tensors["rope_freqs.weight"] = (np.ones(8, np.float32), "F32")
    metadata = {**LLAMA_METADATA, "x.flags": [True, False], "x.text": "a" * 40, "x.negative": -3}
    with TemporaryDirectory() as directory:
        return write_gguf(Path(directory) / "m.gguf", tensors, metadata).read_bytes()


@cache
def header_bytes() -> int:
    with TemporaryDirectory() as directory:
        path = Path(directory) / "m.gguf"
        path.write_bytes(valid_file())
        with GGUFFile.open(path) as file:
            return min(tensor.offset for tensor in file.tensors.values())


def use(raw: bytes) -> bool:
    """Do with a file all that loading does. True when it was good; an error of another type escapes."""
    with TemporaryDirectory() as directory:
        path = Path(directory) / "m.gguf"
        path.write_bytes(raw)
        try:
            with GGUFFile.open(path) as file:
                dict(file.metadata)
            checkpoint = open_checkpoint(read_model_config(path, "identity", SPECS), SPECS)
            try:
                for name, info in checkpoint.tensors().items():
                    assert checkpoint.read(name, torch.float32).shape == info.shape
            finally:
                checkpoint.close()
        except ModelError as error:
            assert str(path) in str(error)
            return False
    return True


positions = st.integers(0, 1 << 20)
numbers = st.sampled_from(
    [0, 1, 2, 3, 7, 8, 9, 31, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
) | st.integers(0, 2**64 - 1)


def flipped(raw: bytes, flips: list[tuple[int, int]], limit: int) -> bytes:
    changed = bytearray(raw)
    for position, mask in flips:
        changed[position % limit] ^= mask
    return bytes(changed)


def check_flips(flips: list[tuple[int, int]], limit: int) -> None:
    use(flipped(valid_file(), flips, limit))


def check_splice(position: int, number: int, width: str) -> None:
    """A hostile number in place of a real one."""
    raw = bytearray(valid_file())
    mask = (1 << 8 * struct.calcsize(width)) - 1
    struct.pack_into(width, raw, position % (header_bytes() - 8), number & mask)
    use(bytes(raw))


def test_the_sample_itself_is_good() -> None:
    assert use(valid_file())


@LIVENESS
@FUZZ
@given(st.integers(0, 1 << 20))
def test_truncation(length: int) -> None:
    raw = valid_file()
    assert not use(raw[: length % (len(raw) - 32)])  # beyond that only padding is missing


@LIVENESS
@FUZZ
@given(st.lists(st.tuples(positions, st.integers(1, 255)), min_size=1, max_size=4))
def test_flipped_header_bytes(flips: list[tuple[int, int]]) -> None:
    check_flips(flips, header_bytes())


@LIVENESS
@FUZZ
@given(st.lists(st.tuples(positions, st.integers(1, 255)), min_size=1, max_size=4))
def test_flipped_bytes_anywhere(flips: list[tuple[int, int]]) -> None:
    check_flips(flips, len(valid_file()))


@LIVENESS
@FUZZ
@given(positions, numbers, st.sampled_from(["<Q", "<I"]))
def test_hostile_numbers(position: int, number: int, width: str) -> None:
    check_splice(position, number, width)


@LIVENESS
@FUZZ
@given(st.binary(max_size=400))
def test_random_bytes_after_the_magic(tail: bytes) -> None:
    assert not use(b"GGUF\x03\0\0\0" + tail)


@pytest.mark.row("LOAD-GGUF", "each block type dequantizes bit-equal to gguf-py's dequantize")
@given(st.sampled_from(sorted([*DECODERS, *PLAIN_TYPES])), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_random_blocks_equal_gguf_py(type_name: str, count: int, seed: int) -> None:
    kind = gguf.GGMLQuantizationType[type_name]
    data = np.random.default_rng(seed).integers(0, 256, (count, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = np.asarray(gguf.quants.dequantize(data.copy(), kind), np.float32).reshape(-1)
    ours = dequantize(torch.from_numpy(data).reshape(-1), type_name).float().numpy()
    number = ~np.isnan(expected)
    assert np.array_equal(np.isnan(ours), ~number)
    assert np.array_equal(ours.view(np.uint32)[number], expected.view(np.uint32)[number])


@pytest.mark.heavy
@pytest.mark.timeout(1200)
def test_every_header_byte_takes_hostile_values() -> None:
    raw = valid_file()
    for position in range(header_bytes()):
        for value in {0, 1, 0x7F, 0x80, 0xFF, raw[position] ^ 1, raw[position] ^ 0x80} - {raw[position]}:
            changed = bytearray(raw)
            changed[position] = value
            use(bytes(changed))


@pytest.mark.heavy
@pytest.mark.timeout(1200)
@settings(max_examples=5000)
@given(
    positions, numbers, st.sampled_from(["<Q", "<I"]), st.lists(st.tuples(positions, st.integers(1, 255)), max_size=6)
)
def test_hostile_numbers_with_flips(position: int, number: int, width: str, flips: list[tuple[int, int]]) -> None:
    raw = bytearray(flipped(valid_file(), flips, header_bytes()))
    struct.pack_into(width, raw, position % (header_bytes() - 8), number & ((1 << 8 * struct.calcsize(width)) - 1))
    use(bytes(raw))
