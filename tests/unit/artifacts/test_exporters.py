"""Each client's encoding against bytes written by hand from the table of encodings: what changes on the wire changes here
(RE-57)."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest

from infer.artifacts import ArtifactChoice, RoutedExperts
from infer.artifacts.exporters import (
    pad_rows,
    to_miles,
    to_nemo_nrlre1,
    to_prime_rl,
    to_sglang_int32,
    to_skyrl,
    to_verl,
    to_vllm_npy,
)
from infer.errors import ArtifactError, ArtifactFieldMissingError

ROWS = [[[3, 0], [1, 2]], [[2, 1], [0, 3]]]


def choice(ids: Any = ROWS, *, start: int = 0, experts: int = 4, layers: tuple[int, ...] = (1, 3)) -> ArtifactChoice:
    ids = np.asarray(ids)
    tokens = list(range(start + len(ids) + 1))
    return ArtifactChoice(0, len(tokens) - 1, tokens, RoutedExperts(start, ids, layers, (experts,) * len(layers)))


def unpack(text: str, dtype: str) -> list[int]:
    return np.frombuffer(base64.b64decode(text, validate=True), dtype).tolist()


FLAT = [3, 0, 1, 2, 2, 1, 0, 3]


def test_vllm() -> None:
    """The header of the file is spelt out: format 1.0, C order, no pickle."""
    made = to_vllm_npy(choice())
    raw = base64.b64decode(made.routed_experts)
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (2, 2, 2), }"
    assert raw[:8] == b"\x93NUMPY\x01\x00" and raw[10:].startswith(header)
    assert raw[-8:] == bytes(FLAT)
    assert (made.routed_experts_prompt_start, made.layer_ids) == (0, (1, 3))


def test_vllm_counts_all_layers() -> None:
    made = to_vllm_npy(choice(start=5), num_hidden_layers=4)
    array = np.load(io.BytesIO(base64.b64decode(made.routed_experts)), allow_pickle=False)
    assert array.tolist() == [[[0, 1], [3, 0], [0, 1], [1, 2]], [[0, 1], [2, 1], [0, 1], [0, 3]]]
    assert made.routed_experts_prompt_start == 5


@pytest.mark.parametrize(("experts", "dtype"), [(256, "|u1"), (257, "<u2"), (65_536, "<u2"), (65_537, "<i4")])
def test_vllm_goes_by_the_number_of_experts(experts: int, dtype: str) -> None:
    raw = base64.b64decode(to_vllm_npy(choice(experts=experts)).routed_experts)
    assert f"'descr': '{dtype}'".encode() in raw


def test_prime_rl() -> None:
    assert to_prime_rl(choice(start=7)) == {
        "data": "AwABAgIBAAM=",
        "shape": [2, 2, 2],
        "start": 7,
        "dtype": "uint8",
    }
    wide = to_prime_rl(choice([[[256, 0]]], experts=300, layers=(0,)))
    assert (wide["dtype"], wide["data"]) == ("uint16", base64.b64encode(b"\0\1\0\0").decode())
    assert to_prime_rl(choice([[[255, 0]]], experts=300, layers=(0,)))["dtype"] == "uint8", "by the largest id"
    with pytest.raises(ArtifactError):
        to_prime_rl(choice([[[65_536, 0]]], experts=70_000, layers=(0,)))


def test_skyrl() -> None:
    made = to_skyrl(choice())
    assert made.routed_experts == {"data": "AwABAgIBAAM=", "shape": [2, 2, 2], "dtype": "uint8"}
    assert made.padding_mask == (False, False)
    padded = to_skyrl(choice(), pad_to=4)
    assert unpack(padded.routed_experts["data"], "u1") == [*FLAT, 0, 1, 0, 1, 0, 1, 0, 1]
    assert (padded.routed_experts["shape"], padded.padding_mask) == ([4, 2, 2], (False, False, True, True))
    for largest, dtype in ((255, "uint8"), (256, "int16"), (32_767, "int16"), (32_768, "int32")):
        made = to_skyrl(choice([[[largest, 0]]], experts=100_000, layers=(0,)))
        assert made.routed_experts["dtype"] == dtype
        assert unpack(made.routed_experts["data"], np.dtype(dtype).newbyteorder("<").str) == [largest, 0]
    with pytest.raises(ArtifactError, match="begin at token 7"):
        to_skyrl(choice(start=7))


def test_slime_and_sglang() -> None:
    made = to_sglang_int32(choice(start=7))
    assert made["routed_experts_start_len"] == 7
    assert base64.b64decode(made["routed_experts"]) == bytes(b for value in FLAT for b in (value, 0, 0, 0))


def test_miles() -> None:
    assert to_miles(choice()) == to_sglang_int32(choice())
    with pytest.raises(ArtifactError):
        to_miles(choice(start=1))


def test_nemo_rl() -> None:
    assert to_nemo_nrlre1(choice()) == "nrlre1:int8:2x2x2:AwABAgIBAAM="
    late = to_nemo_nrlre1(choice(start=1))
    assert late == "nrlre1:int8:3x2x2:" + base64.b64encode(b"\xff\xff\xff\xff" + bytes(FLAT)).decode()
    for experts, dtype in ((128, "int8"), (129, "int16"), (32_768, "int16"), (32_769, "int32")):
        assert to_nemo_nrlre1(choice(experts=experts)).split(":")[1] == dtype


def test_verl() -> None:
    made = to_verl(choice(start=1))
    assert made.routed_experts.dtype == np.int16
    assert made.routed_experts.tolist() == [[[0, 0], [0, 0]], *ROWS, [[0, 0], [0, 0]]]
    assert made.replay_mask.tolist() == [False, True, True, False]
    with pytest.raises(ArtifactError):
        to_verl(choice(experts=32_769))


@pytest.mark.parametrize(
    "export", [to_vllm_npy, to_prime_rl, to_skyrl, to_sglang_int32, to_miles, to_nemo_nrlre1, to_verl]
)
def test_every_exporter(export: Any) -> None:
    """No routes is an error; no rows is none; a layer outside the model is refused, and dense layers are filled."""
    with pytest.raises(ArtifactFieldMissingError):
        export(ArtifactChoice(0, 1, [1, 2]))
    export(choice(np.zeros((0, 2, 2), np.uint8)))
    with pytest.raises(ArtifactError):
        export(choice(), num_hidden_layers=3)
    export(choice(), num_hidden_layers=4)


@pytest.mark.parametrize("spread", [True, False])
def test_padding_rows_have_distinct_experts(spread: bool) -> None:
    """RE-20: spread over all of them, so that no rank gets all the padding."""
    made = pad_rows(np.zeros((1, 3, 4), np.uint8), 100, 30, spread=spread)
    rows = made.expert_ids[1:]
    assert made.padding_mask.tolist() == [False] + [True] * 99
    assert all(len(set(row)) == 4 for row in rows.reshape(-1, 4).tolist())
    counts = np.bincount(rows.ravel(), minlength=30)
    assert counts.max() - counts.min() <= 3 if spread else counts[4:].sum() == 0
    assert made.expert_ids[0].tolist() == [[0] * 4] * 3


def test_padding_that_cannot_be() -> None:
    for rows, experts in ((0, 8), (5, 1)):
        with pytest.raises(ArtifactError):
            pad_rows(np.zeros((1, 1, 2), np.uint8), rows, experts)
    assert pad_rows(np.zeros((1, 1, 2), np.uint8), 500, 400).expert_ids.max() == 399
