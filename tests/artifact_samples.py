"""Samples of generation artifacts: the published vectors, drawn ones, and a reader that shares no code with the product.

Used by the tests of artifacts; owns nothing.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import zstandard
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from infer.artifacts import ArtifactChoice, GenerationArtifact, RoutedExperts, SelectedLogprobs

G1 = GenerationArtifact(
    choices=[
        ArtifactChoice(
            choice_index=0,
            prompt_token_count=2,
            sequence_token_ids=[101, 102, 201, 202],
            moe_routes=RoutedExperts(
                token_start=0,
                expert_ids=[[[0, 2], [1, 3]], [[1, 2], [0, 3]], [[2, 3], [1, 0]]],
                router_ids=[3, 7],
                expert_counts=[4, 4],
            ),
            selected_logprobs=SelectedLogprobs(token_start=2, logprobs=[-0.25, -0.5]),
        )
    ]
)
G1_SHA256 = "f40aa2f833076a63a6a82f2aaeedd99050e6c788b7f51d341ee12af158da933b"
G1_PRELUDE = "44594e4558503100010000000000390100003400000000000000"
G1_MANIFEST = (
    "81a763686f696365739184ac63686f6963655f696e64657800aa636f6d706f6e656e74739285ad6578706572745f636f756e7473920404aa"
    "6578706572745f69647384aa627974655f636f756e740ca56474797065a27538a66f666673657420a5736861706593030202a46b696e64aa"
    "6d6f655f726f75746573aa726f757465725f696473920307ab746f6b656e5f73746172740083a46b696e64b173656c65637465645f6c6f67"
    "70726f6273a86c6f6770726f627384aa627974655f636f756e7408a56474797065a466703332a66f66667365742ca573686170659102ab74"
    "6f6b656e5f737461727402b270726f6d70745f746f6b656e5f636f756e7402b273657175656e63655f746f6b656e5f69647384aa62797465"
    "5f636f756e7420a56474797065a3693634a66f666673657400a573686170659104"
)
G1_PAYLOAD = "65000000000000006600000000000000c900000000000000ca00000000000000000201030102000302030100000080be000000bf"
A = GenerationArtifact(choices=[ArtifactChoice(choice_index=0, prompt_token_count=1, sequence_token_ids=[101, 201])])
A_SHA256 = "a6b9039a1b31fc2e8cadfae2c7f69d088bce6a59b71adb7bdb21e16cd7ccd9d4"
A_OBJECT = (
    "44594e455850310001000000000073000000100000000000000081a763686f696365739184ac63686f6963655f696e64657800aa636f6d70"
    "6f6e656e747390b270726f6d70745f746f6b656e5f636f756e7401b273657175656e63655f746f6b656e5f69647384aa627974655f636f75"
    "6e7410a56474797065a3693634a66f666673657400a573686170659102000000000000000000000000006500000000000000c90000000000"
    "0000"
)
_DTYPES = {"u8": "u1", "u16": "<u2", "i32": "<i4", "i64": "<i8", "fp32": "<f4"}


@st.composite
def artifacts(draw: st.DrawFn) -> GenerationArtifact:
    """Small artifacts of every shape: several choices, with and without components, ids of every width."""
    indices = sorted(draw(st.sets(st.integers(0, 300), min_size=1, max_size=3)))
    return GenerationArtifact(choices=tuple(draw(_choices(index)) for index in indices))


@st.composite
def _choices(draw: st.DrawFn, index: int) -> ArtifactChoice:
    tokens = draw(hnp.arrays(np.int64, st.integers(0, 12), elements=st.integers(0, 2**63 - 1)))
    prompt = draw(st.integers(0, len(tokens)))
    routes = logprobs = None
    if len(tokens) and draw(st.booleans()):
        start, routers = draw(st.integers(0, len(tokens) - 1)), draw(st.integers(1, 3))
        experts = draw(st.sampled_from([1, 8, 256, 257, 65_536, 65_537, 2**31, 2**33]))
        shape = (len(tokens) - start - 1, routers, draw(st.integers(1, 4)))
        ids = draw(hnp.arrays(np.int64, shape, elements=st.integers(0, experts - 1)))
        layers = draw(st.permutations(range(routers)))
        routes = RoutedExperts(start, ids, tuple(layers), (experts,) * routers)
    if draw(st.booleans()):
        finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
        logprobs = SelectedLogprobs(prompt, draw(hnp.arrays(np.float32, len(tokens) - prompt, elements=finite)))
    return ArtifactChoice(index, prompt, tokens, routes, logprobs)


def independent_read(data: bytes) -> list[dict[str, Any]]:
    """The choices of an object, read after the format's description alone."""
    assert data[:8] == b"DYNEXP1\x00"
    major, minor, codec, manifest_length, payload_length = struct.unpack("<HHHIQ", data[8:26])
    assert (major, minor) == (1, 0)
    body = data[26:] if codec == 0 else zstandard.ZstdDecompressor().decompress(data[26:])
    start = (manifest_length + 63) // 64 * 64
    assert len(body) == start + payload_length
    manifest, end = _msgpack(body, 0)
    assert end == manifest_length and not any(body[end:start])
    found = []
    for choice in manifest["choices"]:
        entry = {
            "index": choice["choice_index"],
            "prompt": choice["prompt_token_count"],
            "tokens": _tensor(body, start, choice["sequence_token_ids"]),
        }
        for part in choice["components"]:
            name = {"moe_routes": "expert_ids", "selected_logprobs": "logprobs"}[part["kind"]]
            entry[part["kind"]] = {**part, name: _tensor(body, start, part[name])}
        found.append(entry)
    return found


def _tensor(body: bytes, start: int, tensor: dict[str, Any]) -> Any:
    raw = body[start + tensor["offset"] : start + tensor["offset"] + tensor["byte_count"]]
    return np.frombuffer(raw, _DTYPES[tensor["dtype"]]).reshape(tensor["shape"]).tolist()


def _msgpack(data: bytes, at: int) -> tuple[Any, int]:
    """The subset that a manifest uses."""
    head = data[at]
    at += 1
    if head <= 0x7F:
        return head, at
    if head in (0xCC, 0xCD, 0xCE, 0xCF):
        width = 1 << (head - 0xCC)
        return int.from_bytes(data[at : at + width], "big"), at + width
    if 0xA0 <= head <= 0xBF:
        return data[at : at + head - 0xA0].decode(), at + head - 0xA0
    if 0x90 <= head <= 0x9F or head in (0xDC, 0xDD):
        count, at = (head - 0x90, at) if head <= 0x9F else _length(data, at, 2 if head == 0xDC else 4)
        items = []
        for _ in range(count):
            item, at = _msgpack(data, at)
            items.append(item)
        return items, at
    assert 0x80 <= head <= 0x8F, f"byte {head:#x} at {at - 1}"
    made = {}
    for _ in range(head - 0x80):
        key, at = _msgpack(data, at)
        made[key], at = _msgpack(data, at)
    return made, at


def _length(data: bytes, at: int, width: int) -> tuple[int, int]:
    return int.from_bytes(data[at : at + width], "big"), at + width
