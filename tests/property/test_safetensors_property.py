"""Damaged safetensors files: any truncation, flip or rewritten header gives a typed error or a good read."""

from __future__ import annotations

import json
import struct
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save

from infer.errors import ModelError
from infer.weights.safetensors import DTYPES, SafetensorsCheckpoint

LIVENESS = pytest.mark.timeout(120)
FUZZ = settings(max_examples=max(400, settings.default.max_examples if settings.default else 0))


@cache
def valid_file() -> bytes:
    tensors = {
        "model.a": torch.arange(24, dtype=torch.float32).view(4, 6),
        "model.b": torch.ones(3, 5, dtype=torch.bfloat16),
        "model.c": torch.arange(7, dtype=torch.uint8),
    }
    return save(tensors, metadata={"format": "pt"})


def header_bytes() -> int:
    return 8 + int.from_bytes(valid_file()[:8], "little")


def use(raw: bytes) -> bool:
    with TemporaryDirectory() as directory:
        path = Path(directory) / "model.safetensors"
        path.write_bytes(raw)
        try:
            checkpoint = SafetensorsCheckpoint(directory)
            for name, info in checkpoint.tensors().items():
                assert checkpoint.read(name, torch.float32).shape == info.shape
        except ModelError as error:
            assert str(path) in str(error)
            return False
        # What we accept, the library accepts too, with the same tensors.
        assert set(load_file(path)) == set(checkpoint.tensors())
    return True


def test_the_sample_itself_is_good() -> None:
    assert use(valid_file())


@LIVENESS
@FUZZ
@given(st.integers(0, 1 << 20))
def test_truncation(length: int) -> None:
    assert not use(valid_file()[: length % len(valid_file())])


@LIVENESS
@FUZZ
@given(st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(1, 255)), min_size=1, max_size=4))
def test_flipped_header_bytes(flips: list[tuple[int, int]]) -> None:
    changed = bytearray(valid_file())
    for position, mask in flips:
        changed[position % header_bytes()] ^= mask
    use(bytes(changed))


sizes = st.integers(-1, 9) | st.sampled_from([2**31, 2**40, 2**63, 2**64, -(2**63)])
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPES, "F4", "", "f32"]),
        "shape": st.lists(sizes, max_size=4) | st.none(),
        "data_offsets": st.lists(sizes, min_size=1, max_size=3),
    }
)
json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | entries,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@LIVENESS
@FUZZ
@given(
    st.dictionaries(st.text(max_size=8) | st.just("__metadata__"), entries | json_values, max_size=4),
    st.binary(max_size=64),
)
def test_any_json_header(header: dict[str, Any], data: bytes) -> None:
    raw = json.dumps(header).encode()
    use(struct.pack("<Q", len(raw)) + raw + data)


@LIVENESS
@FUZZ
@given(st.integers(0, 2**64 - 1), st.binary(max_size=200))
def test_random_bytes(length: int, tail: bytes) -> None:
    use(struct.pack("<Q", length % 256) + tail)
    assert not use(struct.pack("<Q", max(length, 1000)) + tail)


@pytest.mark.heavy
@pytest.mark.timeout(1200)
def test_every_header_byte_takes_hostile_values() -> None:
    raw = valid_file()
    for position in range(header_bytes()):
        for value in {*b'\0"{}[],:-09ex\\\xff', raw[position] ^ 1, raw[position] ^ 0x80} - {raw[position]}:
            changed = bytearray(raw)
            changed[position] = value
            use(bytes(changed))


@pytest.mark.heavy
@pytest.mark.timeout(1200)
@settings(max_examples=5000)
@given(st.dictionaries(st.text(max_size=8), entries, max_size=3), st.binary(max_size=40))
def test_many_json_headers(header: dict[str, Any], data: bytes) -> None:
    raw = json.dumps(header).encode()
    use(struct.pack("<Q", len(raw)) + raw + data)
