"""The bytes of generation_artifact_v1: published vectors, and each rule of the format broken on purpose."""

from __future__ import annotations

import hashlib
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard

from artifact_samples import A_OBJECT, A_SHA256, G1, G1_MANIFEST, G1_PAYLOAD, G1_PRELUDE, G1_SHA256, A
from infer.artifacts import ArtifactChoice, GenerationArtifact, RoutedExperts, SelectedLogprobs, decode, encode
from infer.artifacts.v1.encoder import encode_v1
from infer.artifacts.v1.limits import MAX_OBJECT_BYTES, align64, encoded_bound, id_width, zstd_bound
from infer.errors import ArtifactCorruptError, ArtifactError

Manifest = dict[str, Any]


def g1_parts() -> tuple[Manifest, bytes]:
    return msgspec.msgpack.decode(bytes.fromhex(G1_MANIFEST)), bytes.fromhex(G1_PAYLOAD)


def build(manifest: bytes, payload: bytes, *, codec: int = 0, major: int = 1, minor: int = 0) -> bytes:
    """An object of parts that need not fit together."""
    body = manifest.ljust(align64(len(manifest)), b"\0") + payload
    if codec == 1:
        body = zstandard.ZstdCompressor(level=1).compress(body)
    return struct.pack("<8sHHHIQ", b"DYNEXP1\0", major, minor, codec, len(manifest), len(payload)) + body


def rebuilt(change: Callable[[Manifest], object], payload: bytes | None = None) -> bytes:
    """G1 with its manifest changed, written canonically."""
    manifest, original = g1_parts()
    change(manifest)
    return build(msgspec.msgpack.encode(manifest, order="deterministic"), original if payload is None else payload)


def choice(**changes: Any) -> GenerationArtifact:
    (first,) = G1.choices
    values = {name: getattr(first, name) for name in ArtifactChoice.__dataclass_fields__}
    return GenerationArtifact(choices=[ArtifactChoice(**(values | changes))])


def routes(**changes: Any) -> GenerationArtifact:
    original = G1.choices[0].moe_routes
    assert original is not None
    values = {name: getattr(original, name) for name in RoutedExperts.__dataclass_fields__}
    return choice(moe_routes=RoutedExperts(**(values | changes)))


def test_the_published_vectors_byte_for_byte() -> None:
    """T04, T05, T110."""
    data = encode(G1, "none")
    assert data == bytes.fromhex(G1_PRELUDE + G1_MANIFEST) + bytes(7) + bytes.fromhex(G1_PAYLOAD)
    assert (len(data), hashlib.sha256(data).hexdigest()) == (398, G1_SHA256)
    assert encode(A, "none") == bytes.fromhex(A_OBJECT)
    assert (len(bytes.fromhex(A_OBJECT)), hashlib.sha256(bytes.fromhex(A_OBJECT)).hexdigest()) == (170, A_SHA256)
    assert decode(data) == G1
    assert decode(bytes.fromhex(A_OBJECT)) == A


def test_zstd_is_one_frame_that_declares_its_content() -> None:
    """T06, T01, BR-27."""
    data = encode(G1)
    frame = zstandard.get_frame_parameters(data[26:])
    assert data[12:14] == b"\x01\x00"
    assert (frame.content_size, frame.dict_id, frame.has_checksum) == (320 + 52, 0, False)
    assert data == encode(G1, "zstd")
    assert decode(data) == G1
    plain, packed = encode_v1(G1, "none"), encode_v1(G1, "zstd")
    assert plain.body_sha256 == packed.body_sha256 == hashlib.sha256(plain.data[26:]).hexdigest()
    assert packed.sha256 == hashlib.sha256(packed.data).hexdigest()


def test_decoded_arrays_are_read_only_and_narrow() -> None:
    (first,) = decode(encode(G1)).choices
    assert first.moe_routes is not None and first.selected_logprobs is not None
    arrays: list[Any] = [
        first.sequence_token_ids,
        first.moe_routes.expert_ids,
        first.selected_logprobs.logprobs,
    ]
    assert [array.dtype.name for array in arrays] == ["int64", "uint8", "float32"]
    assert not any(array.flags.writeable for array in arrays)


@pytest.mark.parametrize("skip", [0, 1, 3])
def test_an_object_at_any_offset_of_a_buffer_is_read(skip: int) -> None:
    """BR-28."""
    buffer = bytearray(skip) + encode(G1, "none")
    assert decode(memoryview(buffer)[skip:]) == G1


@pytest.mark.parametrize(
    ("largest", "dtype"), [(255, "uint8"), (256, "uint16"), (65_536, "int32"), (2**31 - 1, "int32"), (2**31, "int64")]
)
def test_routes_take_the_narrowest_type_of_their_values(largest: int, dtype: str) -> None:
    artifact = routes(expert_ids=[[[0, 1], [0, largest]]] * 3, expert_counts=[2**40, 2**40])
    found = decode(encode(artifact)).choices[0].moe_routes
    assert found is not None
    assert found.expert_ids.dtype.name == dtype  # type: ignore[union-attr]
    assert found == artifact.choices[0].moe_routes


def test_many_experts_with_small_ids_are_bytes() -> None:
    found = decode(encode(routes(expert_counts=[384, 384]))).choices[0].moe_routes
    assert found is not None and found.expert_ids.dtype.name == "uint8"  # type: ignore[union-attr]


def test_routes_that_start_late() -> None:
    """T02; zero rows are legal too."""
    for start, rows in ((2, [[[2, 3], [1, 0]]]), (3, np.zeros((0, 2, 2), np.uint16))):
        artifact = routes(token_start=start, expert_ids=rows)
        assert decode(encode(artifact, "none")) == artifact


def test_a_slice_of_a_larger_array_is_written_as_it_reads() -> None:
    wide = np.arange(3 * 4 * 2, dtype=np.int64).reshape(3, 4, 2) % 4
    sliced = wide[:, ::2]
    assert not sliced.flags.c_contiguous
    assert decode(encode(routes(expert_ids=sliced))) == routes(expert_ids=sliced.tolist())


REFUSED_BY_THE_ENCODER = {
    "one row too many": routes(expert_ids=[[[0, 1], [0, 1]]] * 4),
    "one row too few": routes(expert_ids=[[[0, 1], [0, 1]]] * 2),
    "expert id equal to the count": routes(expert_ids=[[[0, 4], [0, 1]]] * 3),
    "negative expert id": routes(expert_ids=np.full((3, 2, 2), -1)),
    "no routers": routes(expert_ids=np.zeros((3, 0, 2), np.uint8), router_ids=[], expert_counts=[]),
    "no experts per token": routes(expert_ids=np.zeros((3, 2, 0), np.uint8)),
    "a router twice": routes(router_ids=[3, 3]),
    "expert count of zero": routes(expert_counts=[4, 0]),
    "route start at the end": routes(token_start=4, expert_ids=np.zeros((0, 2, 2), np.uint8)),
    "route start of a half": routes(token_start=0.5),
    "route start of True": routes(token_start=True),
    "negative route start": routes(token_start=-1),
    "floating expert ids": routes(expert_ids=np.zeros((3, 2, 2))),
    "boolean expert ids": routes(expert_ids=np.zeros((3, 2, 2), bool)),
    "ragged expert ids": routes(expert_ids=[[[0, 1], [0, 1]], [[0, 1], [0]], [[0, 1], [0, 1]]]),
    "unsigned expert ids above int64": routes(
        expert_ids=np.full((3, 2, 2), 2**63, np.uint64), expert_counts=[2**63 - 1] * 2
    ),
    "choice index of 1.5": choice(choice_index=1.5),
    "negative prompt": choice(prompt_token_count=-1),
    "prompt longer than the sequence": choice(prompt_token_count=5, moe_routes=None, selected_logprobs=None),
    "unsigned tokens above int64": choice(sequence_token_ids=np.array([2**63] * 4, np.uint64)),
    "negative token": choice(sequence_token_ids=[1, 2, 3, -4]),
    "token too large for int64": choice(sequence_token_ids=[1, 2, 3, 2**63]),
    "tokens of rank 2": choice(sequence_token_ids=np.zeros((2, 2), np.int64)),
    "a boolean token": choice(sequence_token_ids=[1, 2, 3, True]),
    "tokens as text": choice(sequence_token_ids="1234"),
    "one logprob too many": choice(selected_logprobs=SelectedLogprobs(2, [-1.0] * 3)),
    "logprobs that start elsewhere": choice(selected_logprobs=SelectedLogprobs(1, [-1.0] * 3)),
    "NaN": choice(selected_logprobs=SelectedLogprobs(2, [-1.0, float("nan")])),
    "minus infinity": choice(selected_logprobs=SelectedLogprobs(2, [-1.0, float("-inf")])),
    "beyond float32": choice(selected_logprobs=SelectedLogprobs(2, np.array([-1.0, -1e39]))),
    "an integer beyond any float": choice(selected_logprobs=SelectedLogprobs(2, [-1.0, 10**400])),
    "logprobs of integers": choice(selected_logprobs=SelectedLogprobs(2, np.array([-1, -2]))),
    "a missing logprob": choice(selected_logprobs=SelectedLogprobs(2, [-1.0, None])),  # type: ignore[list-item]
    "no choice": GenerationArtifact(choices=[]),
    "two choices of one index": GenerationArtifact(choices=[*A.choices, *A.choices]),
}


@pytest.mark.parametrize("name", REFUSED_BY_THE_ENCODER)
def test_the_encoder_refuses(name: str) -> None:
    """T08, T09, T10, T11, T17, T18, T51."""
    with pytest.raises(ArtifactError) as caught:
        encode(REFUSED_BY_THE_ENCODER[name])
    assert caught.value.code == "artifact_capture_failed"


def _set(*path: Any, to: Any) -> Callable[[Manifest], None]:
    def change(manifest: Manifest) -> None:
        node: Any = manifest
        for part in path[:-1]:
            node = node[part]
        node[path[-1]] = to

    return change


SEQUENCE = ("choices", 0, "sequence_token_ids")
ROUTES = ("choices", 0, "components", 0)
LOGPROBS = ("choices", 0, "components", 1)
CHANGED_MANIFESTS = {
    "no choices": _set("choices", to=[]),
    "an unknown key": _set("more", to=1),
    "an unknown key of a choice": _set("choices", 0, "more", to=1),
    "an unknown key of a tensor": _set(*SEQUENCE, "more", to=1),
    "a missing key": lambda manifest: manifest["choices"][0].pop("prompt_token_count"),
    "another kind": _set(*ROUTES, "kind", to="moe_gates"),
    "two of one kind": lambda manifest: (
        manifest["choices"][0]["components"].reverse()
        or manifest["choices"][0]["components"].append(manifest["choices"][0]["components"][0])
    ),
    "a boolean choice index": _set("choices", 0, "choice_index", to=True),
    "a floating choice index": _set("choices", 0, "choice_index", to=0.0),
    "a null component": _set(*ROUTES, to=None),
    "a list as dtype": _set(*SEQUENCE, "dtype", to=["i64"]),
    "an unknown dtype": _set(*SEQUENCE, "dtype", to="i8"),
    "sequence in u8": _set(*SEQUENCE, "dtype", to="u8"),
    "logprobs in fp16": _set(*LOGPROBS, "logprobs", "dtype", to="fp16"),
    "logprobs in i32": _set(*LOGPROBS, "logprobs", "dtype", to="i32"),
    "routes in fp32": _set(
        *ROUTES, "expert_ids", to={"byte_count": 12, "dtype": "fp32", "offset": 32, "shape": [3, 1, 1]}
    ),
    "a gap": _set(*ROUTES, "expert_ids", "offset", to=33),
    "an overlap": _set(*ROUTES, "expert_ids", "offset", to=31),
    "a wrong byte count": _set(*ROUTES, "expert_ids", "byte_count", to=11),
    "a huge shape": _set(*ROUTES, "expert_ids", "shape", to=[2**32, 2**32, 2**32]),
    "a shape with a hidden zero": _set(*ROUTES, "expert_ids", "shape", to=[2**62, 2**62, 0]),
    "a zero that hides a shape": _set(
        *ROUTES, "expert_ids", to={"byte_count": 0, "dtype": "u8", "offset": 32, "shape": [0, 2**40, 2]}
    ),
    "a rank of thousands": _set(*ROUTES, "expert_ids", "shape", to=[1] * 5000),
    "rank 0": _set(*SEQUENCE, to={"byte_count": 8, "dtype": "i64", "offset": 0, "shape": []}),
    "a negative extent": _set(*ROUTES, "expert_ids", "shape", to=[-3, 2, -2]),
    "another rank": _set(*ROUTES, "expert_ids", "shape", to=[12]),
    "a route start beyond the sequence": _set(*ROUTES, "token_start", to=9),
    "an expert count too small": _set(*ROUTES, "expert_counts", to=[2, 4]),
    "a router too many": _set(*ROUTES, "router_ids", to=[3, 7, 9]),
    "logprobs that start elsewhere": _set(*LOGPROBS, "token_start", to=1),
    "a prompt longer than the sequence": _set("choices", 0, "prompt_token_count", to=5),
}


@pytest.mark.parametrize("name", CHANGED_MANIFESTS)
def test_the_decoder_refuses_a_manifest_with(name: str) -> None:
    """T12, T13, T15, T17, T19, T20."""
    with pytest.raises(ArtifactCorruptError):
        decode(rebuilt(CHANGED_MANIFESTS[name]))


def test_the_harness_itself_builds_what_the_decoder_takes() -> None:
    assert decode(rebuilt(lambda manifest: None)) == G1
    manifest, payload = g1_parts()
    assert decode(build(msgspec.msgpack.encode(manifest, order="deterministic"), payload, codec=1)) == G1


def test_components_may_come_in_the_other_order() -> None:
    def swap(manifest: Manifest) -> None:
        parts = manifest["choices"][0]["components"]
        parts.reverse()
        parts[0]["logprobs"]["offset"], parts[1]["expert_ids"]["offset"] = 32, 40

    payload = bytes.fromhex(G1_PAYLOAD)
    assert decode(rebuilt(swap, payload[:32] + payload[44:] + payload[32:44])) == G1


def test_routes_wider_than_their_values_are_refused() -> None:
    """T20: u16 for small ids."""
    _, payload = g1_parts()
    wide = np.frombuffer(payload[32:44], np.uint8).astype("<u2").tobytes()

    def widen(manifest: Manifest) -> None:
        ids = manifest["choices"][0]["components"][0]["expert_ids"]
        ids |= {"byte_count": 24, "dtype": "u16"}
        manifest["choices"][0]["components"][1]["logprobs"]["offset"] = 56

    with pytest.raises(ArtifactCorruptError, match="values need u8"):
        decode(rebuilt(widen, payload[:32] + wide + payload[44:]))


@pytest.mark.parametrize(
    ("offset", "value"),
    [
        (0, 0x45),
        (8, 2),
        (10, 1),
        (12, 99),
        (12, 2),
        (14, 0),
        (17, 0xFF),
        (18, 0),
        (25, 1),
        (26 + 313, 1),
        (26 + 319, 1),
    ],
)
def test_the_decoder_refuses_a_changed_byte(offset: int, value: int) -> None:
    """T07, T12: magic, versions, codec, lengths, padding."""
    data = bytearray(encode(G1, "none"))
    data[offset] = value
    with pytest.raises(ArtifactCorruptError):
        decode(bytes(data))


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_trailing_and_missing_bytes_are_refused(codec: Any) -> None:
    """T07, BR-19."""
    data = encode(G1, codec)
    for wrong in (data + b"\0", data + data[26:], data[:-1], data[:26], data[:7], b""):
        with pytest.raises(ArtifactCorruptError):
            decode(wrong)


def test_a_large_object_cut_at_every_kibibyte_is_refused() -> None:
    """BR-19."""
    ids = np.random.default_rng(1).integers(0, 64, (999, 8, 4)).astype(np.uint8)
    artifact = GenerationArtifact(
        [ArtifactChoice(0, 10, list(range(1000)), RoutedExperts(0, ids, tuple(range(8)), (64,) * 8))]
    )
    data = encode(artifact)
    assert len(data) > 20_000
    for end in range(0, len(data), 1024):
        with pytest.raises(ArtifactCorruptError):
            decode(data[:end])


NOT_CANONICAL = {
    "reordered keys": "82a16201a16102",
    "duplicate keys": "82a16101a16102",
    "an integer in two bytes": "81a161cc01",
    "a string with a long header": "81d9016101",
    "an array with a long header": "81a161dc000101",
    "a map with a long header": "de0001a16101",
    "a signed form of a small integer": "81a161d001",
}


@pytest.mark.parametrize("name", NOT_CANONICAL)
def test_the_decoder_asks_for_canonical_bytes(name: str) -> None:
    """T14, T16: judged before the schema."""
    with pytest.raises(ArtifactCorruptError, match="canonical"):
        decode(build(bytes.fromhex(NOT_CANONICAL[name]), b""))


@pytest.mark.parametrize("manifest", ["c0", "cb3ff0000000000000", "c40100", "d6ff00000000", "a1ff", "91" * 5000, "81"])
def test_other_message_pack_is_refused(manifest: str) -> None:
    with pytest.raises(ArtifactCorruptError):
        decode(build(bytes.fromhex(manifest), b""))


def test_a_bomb_is_refused_before_it_is_unpacked() -> None:
    """BR-20: a 3 kB frame that holds 100 MB, and one whose header lies about a size within the limits."""
    frame = zstandard.ZstdCompressor(level=1).compress(bytes(100_000_000))
    assert len(frame) < 20_000
    for manifest_bytes, payload_bytes in ((64, 100), (64, 2**26)):
        data = struct.pack("<8sHHHIQ", b"DYNEXP1\0", 1, 0, 1, manifest_bytes, payload_bytes) + frame
        tracemalloc.start()
        with pytest.raises(ArtifactCorruptError, match="declares"):
            decode(data)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2**20


def test_an_object_above_the_largest_is_refused() -> None:
    with pytest.raises(ArtifactCorruptError):
        decode(bytes(MAX_OBJECT_BYTES + 1))


def test_input_above_the_payload_limit_is_refused_before_it_is_copied() -> None:
    """T03: an array of zero stride is huge without taking memory."""
    tokens = np.broadcast_to(np.int64(7), (2**23 + 1,))
    ids = np.broadcast_to(np.uint8(1), (2**20 - 1, 8, 9))
    tracemalloc.start()
    with pytest.raises(ArtifactError, match="are left of the payload") as caught:
        encode(choice(sequence_token_ids=tokens, moe_routes=None, selected_logprobs=None))
    assert caught.value.code == "artifact_too_large"
    large = RoutedExperts(0, ids, tuple(range(8)), (64,) * 8)
    with pytest.raises(ArtifactError, match="are left of the payload") as caught:
        encode(
            choice(sequence_token_ids=np.broadcast_to(np.int64(7), (2**20,)), moe_routes=large, selected_logprobs=None)
        )
    assert caught.value.code == "artifact_too_large"
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_sizes() -> None:
    """T21 and the table of limits."""
    assert MAX_OBJECT_BYTES == 68_423_706
    assert [align64(size) for size in (0, 1, 64, 65)] == [0, 64, 64, 128]
    assert [zstd_bound(size) for size in (0, 131_072, 2**26)] == [64, 131_584, 67_371_008]
    assert [id_width(top) for top in (255, 256, 65_535, 65_536, 2**31 - 1, 2**31)] == [1, 2, 2, 4, 4, 8]
    assert encoded_bound(313, 52) >= len(encode(G1))


def test_encoding_makes_no_second_copy() -> None:
    """BR-10: beside what was captured, one encoded object and a mebibyte."""
    ids = np.random.default_rng(2).integers(0, 256, (9_999, 48, 8)).astype(np.uint8)
    tokens = np.arange(10_000)
    artifact = GenerationArtifact([ArtifactChoice(0, 1, tokens, RoutedExperts(0, ids, tuple(range(48)), (256,) * 48))])
    for codec in ("none", "zstd"):
        tracemalloc.start()
        encoded = encode_v1(artifact, codec)  # type: ignore[arg-type]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak <= len(encoded.data) + 2**20
        del encoded


def test_a_digest_finds_every_flipped_bit() -> None:
    """The format has no checksum: the receipt's digest is what finds a change that is well formed."""
    data = encode(G1)
    digest = hashlib.sha256(data).hexdigest()
    assert decode(data, sha256=digest.upper()) == G1
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ArtifactCorruptError):
            decode(flipped, sha256=digest)
