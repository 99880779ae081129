"""The bytes of generation_artifact_v2: the vectors of docs/artifact_v2.md, and each rule of that page broken on purpose."""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard

from artifact_samples import G1, A
from artifact_v2_samples import GOLDEN, independent_read_v2, msgpack
from infer.artifacts import decode, encode, open_artifact
from infer.artifacts.byte_source import MemorySource
from infer.artifacts.record import ChoiceRecord, FieldRows, GenerationRecord, ParentReference, Provenance, WeightSpan
from infer.artifacts.v2.limits import Limits
from infer.artifacts.v2.reader import V2Reader
from infer.artifacts.v2.writer import encode_v2
from infer.errors import ArtifactCorruptError, ArtifactError

PAGE = Path(__file__).parents[3] / "docs" / "artifact_v2.md"
Header = dict[str, Any]


def published() -> dict[str, tuple[bytes, str, str]]:
    """Name -> bytes, SHA-256 and digest of the content, as the page prints them."""
    found = {}
    for part in PAGE.read_text("utf-8").split("\n### Vector ")[1:]:
        sha256, body = re.findall(r"`([0-9a-f]{64})`", part)
        found[part.split("\n")[0]] = (bytes.fromhex("".join(part.split("```")[1].split())), sha256, body)
    return found


VECTORS = published()


def build(header: bytes, payload: bytes, *, major: int = 2, minor: int = 0, zero: int = 0) -> bytes:
    """An object of parts that need not fit together, with the digests of the prelude in order."""
    start = -(-(64 + len(header)) // 64) * 64
    digest = hashlib.sha256(header).digest()
    prelude = struct.pack("<8sHHIQ32sQ", b"INFGEN2\0", major, minor, len(header), start + len(payload), digest, zero)
    return prelude + header.ljust(start - 64, b"\0") + payload


def parts(data: bytes) -> tuple[Header, bytes]:
    length = struct.unpack_from("<I", data, 12)[0]
    return msgpack(data[64 : 64 + length], 0)[0], data[-(-(64 + length) // 64) * 64 :]


def rebuilt(change: Callable[[Header], object], source: str | bytes = "N", payload: bytes | None = None) -> bytes:
    """A vector or object with its header changed, written canonically; what follows it moves along."""
    header, original = parts(VECTORS[source][0] if isinstance(source, str) else source)
    before = min(array["offset"] for field in header["fields"] for array in field["arrays"].values())
    change(header)
    start = 64
    while True:
        moved = [array for field in header["fields"] for array in field["arrays"].values() if "offset" in array]
        for array in moved:
            array["offset"] += start - before
        data = msgspec.msgpack.encode(header, order="deterministic")
        before, start = start, -(-(64 + len(data)) // 64) * 64
        if before == start:
            return build(data, original if payload is None else payload)


def refused(data: bytes, words: str | None = None) -> None:
    with pytest.raises(ArtifactCorruptError, match=words):
        decode(data)


@pytest.mark.row("X-ARTIFACT-V2", "golden vectors")
@pytest.mark.parametrize("name", GOLDEN)
def test_the_published_vectors_byte_for_byte(name: str) -> None:
    data, sha256, body = VECTORS[name]
    encoded = encode_v2(GOLDEN[name], codec="none")
    assert encoded.data == data
    assert (hashlib.sha256(data).hexdigest(), encoded.sha256, encoded.body_sha256) == (sha256, sha256, body)
    assert encoded.header_sha256 == data[24:56].hex() and encoded.header_bytes == struct.unpack_from("<I", data, 12)[0]
    found = open_artifact(data).verify(sha256=sha256.upper(), actual_bytes=len(data))
    assert found.body_sha256 == body == encode_v2(GOLDEN[name]).body_sha256
    header = independent_read_v2(data)
    facts = {key: value for key, value in header.items() if key != "limits"}
    raw = b"".join(array.pop("data").tobytes() for field in facts["fields"] for array in field["arrays"].values())
    for field in facts["fields"]:
        for array in field["arrays"].values():
            for key in ("chunks", "codec", "offset", "sha256", "stored_bytes"):
                array.pop(key, None)
    assert hashlib.sha256(msgspec.msgpack.encode(facts, order="deterministic") + raw).hexdigest() == body


def test_what_the_vectors_say() -> None:
    """Read by the second reader."""
    assert set(VECTORS) == set(GOLDEN) and len(VECTORS) >= 3
    assert decode(VECTORS["A"][0]) == A and decode(VECTORS["G1"][0]) == G1
    assert encode(G1, "none", format="generation_artifact_v2") == VECTORS["G1"][0]
    header = independent_read_v2(VECTORS["N"][0])
    listed = [(field["name"], field["scope"], field["choices"], field["row_start"]) for field in header["fields"]]
    assert listed == sorted(
        listed, key=lambda one: (one[0], ["prompt_token", "output_token", "request"].index(one[1]), one[2])
    )
    assert ("moe_routes", "prompt_token", [0, 1], 0) in listed and ("token_ids", "prompt_token", [0, 1], 0) in listed
    kept = next(field for field in header["fields"] if field["name"] == "kept_set" and field["choices"] == [0])
    assert kept["arrays"]["offsets"]["data"].tolist() == [0, 2, 3]
    assert kept["arrays"]["values"]["data"].tolist() == [201, 5, 202]
    routes = next(field for field in header["fields"] if field["name"] == "moe_routes")
    assert routes["arrays"]["status"]["data"].tolist() == [1, 1, 0]
    assert routes["attributes"] == {"layer_ids": [3, 7], "expert_counts": [4, 4]} and routes["executed"] is True
    assert header["provenance"]["sampling"]["logit_bias"] == {"7": -1.5}
    assert [choice.get("stop_reason") for choice in header["choices"]] == [None, 203]
    child = independent_read_v2(VECTORS["D"][0])
    assert child["parent"]["sha256"].hex() == VECTORS["G1"][1] and child["parent"]["token_count"] == 4
    assert {field["name"]: field["row_start"] for field in reversed(child["fields"])} == {
        "moe_routes": 3,
        "token_ids": 4,
    }


def test_every_chunk_is_one_zstd_frame_at_a_multiple_of_64() -> None:
    data = encode_v2(GOLDEN["N"], codec="zstd", chunk_bytes=8).data
    header = independent_read_v2(data)
    frames = 0
    for field in header["fields"]:
        for array in field["arrays"].values():
            assert array["offset"] % 64 == 0 and array["codec"] == "zstd"
            frame = zstandard.get_frame_parameters(data[array["offset"] :])
            assert (frame.dict_id, frame.has_checksum) == (0, False) and frame.content_size > 0
            frames += len(array.get("chunks", [0]))
    assert frames == header["limits"]["chunks"] > header["limits"]["fields"]
    assert V2Reader(MemorySource(data)).verify().body_sha256 != VECTORS["N"][2], (
        "the cut is part of the content's digest"
    )


CHANGED: dict[str, tuple[Callable[[Header], object], str]] = {
    "no choices": (lambda h: h["choices"].clear(), "at least one choice"),
    "choices out of order": (lambda h: h["choices"].reverse(), "must increase"),
    "an unknown key": (lambda h: h.update(more=1), "schema"),
    "an unknown key of an array": (lambda h: values(h)["arrays"]["values"].update(more=1), "schema"),
    "an unknown key of the provenance": (lambda h: h["provenance"].update(time=1), "schema"),
    "no limits": (lambda h: h.pop("limits"), "schema"),
    "a boolean for a number": (lambda h: values(h).update(row_start=True), "schema"),
    "nil": (lambda h: h["choices"][0].update(seed=None), "canonical"),
    "a default written out": (lambda h: values(h, "token_ids").update(executed=False), "canonical"),
    "an empty map written out": (lambda h: values(h, "token_ids").update(attributes={}), "canonical"),
    "empty numerics": (lambda h: h["provenance"].update(numerics={}), "canonical"),
    "an empty text": (lambda h: h["provenance"].update(model=""), "canonical"),
    "a mode of its own": (lambda h: h["provenance"]["numerics"].update(mode="exact"), "schema"),
    "a number that is not finite": (lambda h: h["provenance"]["sampling"].update(x=float("nan")), "finite"),
    "a whole number as a float": (lambda h: values(h).update(row_start=0.0), "schema"),
    "another finish reason": (lambda h: h["choices"][0].update(finish_reason="tired"), "schema"),
    "a prompt longer than the sequence": (lambda h: h["choices"][0].update(prompt_token_count=9), "longer"),
    "another prompt": (lambda h: h["choices"][0].update(prompt_token_count=2), "token"),
    "one token more": (lambda h: h["choices"][0].update(token_count=6), "token"),
    "entries swapped": (lambda h: swap(h["fields"], 0, 1), "out of order"),
    "an entry twice": (lambda h: h["fields"].insert(1, h["fields"][0]), "twice"),
    "no token ids": (lambda h: drop(h, "token_ids"), "no token_ids"),
    "a choice that is not there": (lambda h: values(h, "kept_set").update(choices=[2]), "does not exist"),
    "no choice": (lambda h: values(h).update(choices=[]), "not be empty"),
    "a name with a blank": (lambda h: h["fields"][0].update(name="acme probes.x"), "field name"),
    "two dots": (lambda h: h["fields"][0].update(name="acme.a.b"), "field name"),
    "another scope": (lambda h: values(h).update(scope="step"), "scope"),
    "an unknown scope": (lambda h: values(h).update(scope="token"), "schema"),
    "executed tokens": (lambda h: values(h, "token_ids").update(executed=True), "executed"),
    "no values": (lambda h: rename(values(h)["arrays"], "values", "valuez"), "values"),
    "an array name": (lambda h: rename(values(h)["arrays"], "status", "Status"), "array name"),
    "an array too many": (lambda h: rename(values(h)["arrays"], "status", "scores"), "arrays"),
    "another dtype": (lambda h: values(h)["arrays"]["values"].update(dtype="u7"), "dtype"),
    "a wider dtype of the same size": (lambda h: values(h, "kept_logmass")["arrays"]["values"].update(dtype="u32"), "dtype"),
    "rank 0": (lambda h: values(h)["arrays"]["values"].update(shape=[]), "rank"),
    "a huge shape": (lambda h: values(h)["arrays"]["values"].update(shape=[2**62, 2**62, 0]), "larger"),
    "a shape that does not fit": (lambda h: values(h)["arrays"]["values"].update(shape=[3, 2, 1]), "bytes"),
    "raw bytes": (lambda h: values(h)["arrays"]["values"].update(raw_bytes=1), "bytes"),
    "stored bytes": (lambda h: values(h)["arrays"]["values"].update(stored_bytes=13), "instead of|stored in"),
    "an offset": (lambda h: values(h)["arrays"]["values"].update(offset=0), "lies at"),
    "arrays swapped": (lambda h: swap_offsets(h), "lies at"),
    "an overlap": (lambda h: overlap(h), "lies at"),
    "no codec": (lambda h: values(h)["arrays"]["values"].pop("codec"), "how it is stored"),
    "another codec": (lambda h: values(h)["arrays"]["values"].update(codec="lz4"), "schema"),
    "a digest of 31 bytes": (lambda h: values(h)["arrays"]["values"].update(sha256=bytes(31)), "how it is stored"),
    "another digest": (lambda h: values(h)["arrays"]["values"].update(sha256=bytes(32)), "SHA-256"),
    "zstd that is raw": (lambda h: values(h)["arrays"]["values"].update(codec="zstd"), "zstd"),
    "a chunk shape of one chunk": (lambda h: values(h)["arrays"]["values"].update(chunk_shape=[3, 2, 2]), "chunks"),
    "chunks without a shape": (lambda h: values(h)["arrays"]["values"].update(chunks=[[12, bytes(32)]]), "chunks"),
    "a chunk shape of zero": (lambda h: values(h)["arrays"]["values"].update(chunk_shape=[0, 2, 2]), "cut"),
    "a chunk shape over experts": (lambda h: values(h)["arrays"]["values"].update(chunk_shape=[3, 2, 1]), "cut"),
    "no expert counts": (lambda h: values(h)["attributes"].pop("expert_counts"), "attributes"),
    "an attribute too many": (lambda h: values(h)["attributes"].update(more=1), "attributes"),
    "a layer twice": (lambda h: values(h)["attributes"].update(layer_ids=[3, 3]), "twice"),
    "a layer too many": (lambda h: values(h)["attributes"].update(layer_ids=[3, 7, 9]), "layer_ids"),
    "wide experts": (lambda h: values(h)["attributes"].update(expert_counts=[4, 257]), "expert_counts"),
    "more experts in the answer": (lambda h: all_of(h, "moe_routes")[1]["attributes"].update(expert_counts=[4, 5]), "continue"),
    "an expert too high": (lambda h: everywhere(h, "moe_routes", expert_counts=[3, 4]), "expert id 3"),
    "layers in a text": (lambda h: values(h)["attributes"].update(layer_ids="37"), "list"),
    "fewer declared chunks": (lambda h: h["limits"].update(chunks=3), "declares"),
    "fewer declared bytes": (lambda h: h["limits"].update(decoded_bytes=1), "declares"),
    "more declared bytes": (lambda h: h["limits"].update(decoded_bytes=2**40), "accepts"),
    "more declared chunks": (lambda h: h["limits"].update(chunks=2**30), "accepts"),
    "a parent without a digest": (lambda h: h.update(parent=parent(sha256=b"")), "SHA-256"),
    "a parent's fields unsorted": (lambda h: h.update(parent=parent(fields=["token_ids", "moe_routes"])), "sorted"),
    "a parent of more tokens": (lambda h: h.update(parent=parent(token_count=4)), "beginning"),
    "rows that the parent has too": (lambda h: h.update(parent=parent()), "parent's rows end at 1"),
    "a field that nobody has": (lambda h: h.update(parent=parent(fields=["entropy"])), "no entropy"),
    "a version too few": (lambda h: everywhere(h, "weight_spans", versions=["x"]), "holds 1"),
}  # fmt: skip


def all_of(header: Header, name: str) -> list[Header]:
    return [field for field in header["fields"] if field["name"] == name]


def values(header: Header, name: str = "moe_routes") -> Header:
    return all_of(header, name)[0]


def everywhere(header: Header, name: str, **attributes: Any) -> None:
    for field in all_of(header, name):
        field["attributes"].update(attributes)


def parent(**changes: Any) -> Header:
    made = {
        "choice_index": 0,
        "fields": ["token_ids"],
        "header_sha256": bytes(32),
        "sha256": bytes(32),
        "token_count": 1,
    }
    return made | changes


def swap(items: list[Any], one: int, other: int) -> None:
    items[one], items[other] = items[other], items[one]


def drop(header: Header, name: str) -> None:
    header["fields"] = [field for field in header["fields"] if field["name"] != name]


def rename(node: Header, old: str, new: str) -> None:
    node[new] = node.pop(old)


def swap_offsets(header: Header) -> None:
    arrays = [array for field in header["fields"] for array in field["arrays"].values()][:2]
    arrays[0]["offset"], arrays[1]["offset"] = arrays[1]["offset"], arrays[0]["offset"]


def overlap(header: Header) -> None:
    arrays = [array for field in header["fields"] for array in field["arrays"].values()][:2]
    arrays[1]["offset"] = arrays[0]["offset"]


@pytest.mark.parametrize("name", CHANGED)
def test_a_header_against_a_rule_is_refused(name: str) -> None:
    change, words = CHANGED[name]
    assert decode(rebuilt(lambda header: None)) == decode(VECTORS["N"][0])
    refused(rebuilt(change), words)


def test_what_is_not_canonical() -> None:
    header, payload = parts(VECTORS["A"][0])
    data = msgspec.msgpack.encode(header, order="deterministic")
    backwards = msgspec.msgpack.encode(dict(reversed(header.items())))
    for made in (
        data.replace(b"\xb2prompt_token_count\x01", b"\xb2prompt_token_count\xcc\x01"),
        data.replace(b"\xa7choices\x91\x83", b"\xa7choices\xdc\x00\x01\x83"),
        data.replace(b"\xacchoice_index\x00", b"\xacchoice_index\x00\xacchoice_index\x00").replace(
            b"\x91\x83", b"\x91\x84"
        ),
        backwards,
        data + b"\0",
        data[:-1],
        b"",
        b"\xc1",
        b"\x91" * 3000,
    ):
        assert made != data
        refused(build(made, payload))


def test_versions_sizes_and_zeros_of_the_prelude() -> None:
    data = VECTORS["G1"][0]
    header = msgspec.msgpack.encode(parts(data)[0], order="deterministic")
    payload = parts(data)[1]
    assert build(header, payload) == data
    refused(build(header, payload, major=3), "version 3.0")
    refused(build(header, payload, minor=1), "version 2.1")
    refused(build(header, payload, zero=1), "not zero")
    refused(data + b"\0", "bytes")
    padding = bytearray(data)
    padding[64 + len(header)] = 1
    refused(bytes(padding), "padding")


@pytest.mark.parametrize("name", ["A", "D"])
def test_any_flipped_bit_is_found(name: str) -> None:
    """Every bit, without a receipt."""
    data = VECTORS[name][0]
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ArtifactCorruptError):
            open_artifact(changed).verify()


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_an_object_cut_anywhere_is_refused(codec: Any) -> None:
    data = encode_v2(GOLDEN["N"], codec=codec).data
    for end in range(len(data)):
        with pytest.raises(ArtifactCorruptError):
            open_artifact(data[:end])


def with_chunk(frame: bytes, array: str = "values") -> bytes:
    """Vector A with its last array, one int64, stored as this frame, all sizes and digests in order."""

    def change(header: Header) -> None:
        entry = header["fields"][-1]["arrays"]["values"]
        entry.update(codec="zstd", stored_bytes=len(frame), sha256=hashlib.sha256(frame).digest())

    payload = parts(VECTORS["A"][0])[1]
    return rebuilt(change, "A", payload[:64] + frame)


def test_frames_that_promise_something_else() -> None:
    """Bombs among them: the frame's own size decides before anything is decompressed."""
    compressor = zstandard.ZstdCompressor(level=1)
    right = compressor.compress(struct.pack("<q", 201))
    assert decode(with_chunk(right)) == A
    dictionary = zstandard.train_dictionary(1024, [bytes([n, n + 1, 0, n]) * 8 for n in range(200)])
    assert dictionary.dict_id()
    for frame in (
        compressor.compress(bytes(2**30)),
        compressor.compress(bytes(7)),
        zstandard.ZstdCompressor(level=1, write_content_size=False).compress(bytes(8)),
        right + right,
        right + b"\0",
        right[:-1],
        b"",
        b"\x28\xb5\x2f\xfd",
        zstandard.ZstdCompressor(dict_data=dictionary).compress(bytes(8)),
    ):
        refused(with_chunk(frame))


CHANGED_CHUNKS: dict[str, tuple[Callable[[Header], object], str]] = {
    "a chunk less": (lambda a: a["chunks"].pop(), "lists 1 chunks and has 2"),
    "chunks in another order": (lambda a: a["chunks"].reverse(), "SHA-256"),
    "a chunk of another size": (lambda a: a["chunks"][1].__setitem__(0, 9), "chunks take"),
    "a chunk of nothing": (lambda a: a["chunks"][1].__setitem__(0, 0), "chunk of 0 bytes"),
    "another digest of a chunk": (lambda a: a["chunks"][1].__setitem__(1, bytes(32)), "chunk at .* another SHA-256"),
    "no digest of a chunk": (lambda a: a["chunks"][1].__setitem__(1, b""), "without a SHA-256"),
    "another digest of the whole": (lambda a: a.update(sha256=bytes(32)), "values has another SHA-256"),
    "one chunk after all": (lambda a: a.update(chunk_shape=[2]), "lists 2 chunks and has 1"),
    "another rank": (lambda a: a.update(chunk_shape=[1, 1]), "cut"),
    "no chunk shape": (lambda a: a.pop("chunk_shape"), "lists 2 chunks and has 1"),
    "no chunks": (lambda a: a.pop("chunks"), "lists 0 chunks and has 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGED_CHUNKS)
def test_chunks_against_a_rule(name: str) -> None:
    """Of an array in two chunks."""
    change, words = CHANGED_CHUNKS[name]
    record = with_field("acme.x", FieldRows(values=np.arange(2.0), axis="step"))
    data = encode_v2(record, codec="none", chunk_bytes=8).data
    array = parts(data)[0]["fields"][0]["arrays"]["values"]
    assert array["chunk_shape"] == [1] and len(array["chunks"]) == 2 and decode(data)
    refused(rebuilt(lambda header: change(header["fields"][0]["arrays"]["values"]), data), words)


def test_values_against_a_rule() -> None:
    """Digests in order, values not."""
    for number in (-1, -(2**63)):
        refused(with_chunk(zstandard.ZstdCompressor().compress(struct.pack("<q", number))), "holds")


def test_a_reader_accepts_no_more_than_it_is_set_to() -> None:
    data = VECTORS["N"][0]
    header = independent_read_v2(data)
    length = struct.unpack_from("<I", data, 12)[0]
    for name, needed in {**header["limits"], "header_bytes": length}.items():
        assert V2Reader(MemorySource(data), limits=Limits(**{name: needed})).choices
        with pytest.raises(ArtifactCorruptError, match=name if name != "header_bytes" else "header"):
            V2Reader(MemorySource(data), limits=Limits(**{name: needed - 1}))
        with pytest.raises(ArtifactError) as caught:
            encode_v2(GOLDEN["N"], codec="none", limits=Limits(**{name: needed - 1}))
        assert caught.value.code == "artifact_too_large"


def one(**changes: Any) -> GenerationRecord:
    """A generation of two prompt and two output tokens."""
    given: dict[str, Any] = {"choice_index": 0, "prompt_token_ids": [1, 2], "output_token_ids": [3, 4]}
    return GenerationRecord(choices=[ChoiceRecord(**(given | changes))])


def with_field(name: str, *pieces: FieldRows) -> GenerationRecord:
    return one(fields={name: pieces[0] if len(pieces) == 1 else list(pieces)})


def routes(count: int = 3, **changes: Any) -> FieldRows:
    given: dict[str, Any] = {
        "values": np.zeros((count, 1, 2), np.int64),
        "attributes": {"layer_ids": (0,), "expert_counts": (4,)},
    }
    return FieldRows(**(given | changes))


F32 = np.zeros(2, np.float32)
REFUSED: dict[str, GenerationRecord] = {
    "no choices": GenerationRecord(choices=[]),
    "two choices of one index": GenerationRecord(choices=[*one().choices, *one().choices]),
    "a negative token": one(prompt_token_ids=[1, -2]),
    "a boolean token": one(prompt_token_ids=[1, True]),
    "tokens of two axes": one(prompt_token_ids=np.zeros((2, 2), np.int64)),
    "a seed of a half": one(seed=0.5),
    "another finish reason": one(finish_reason="tired"),
    "a stop reason of bytes": one(stop_reason=b"x"),
    "an unknown field": with_field("entropie", FieldRows(values=F32, row_start=2)),
    "token ids as a field": with_field("token_ids", FieldRows(values=np.zeros(4, np.int64))),
    "no pieces": one(fields={"entropy": []}),
    "a list of values": with_field("entropy", FieldRows(values=[0.5, 0.5], row_start=2)),  # type: ignore[arg-type]
    "one row too few": with_field("entropy", FieldRows(values=F32[:1], row_start=2)),
    "one row too many": with_field("moe_routes", routes(4)),
    "a gap between pieces": with_field("moe_routes", routes(1), routes(1, row_start=2)),
    "an overlap of pieces": with_field("moe_routes", routes(2), routes(2, row_start=1)),
    "pieces of two shapes": with_field("moe_routes", routes(1), routes(2, row_start=1, values=np.zeros((2, 1, 3), int))),
    "rows that start late": with_field("entropy", FieldRows(values=F32[:1], row_start=3)),
    "an expert equal to the count": with_field("moe_routes", routes(values=np.full((3, 1, 2), 4))),
    "a negative expert": with_field("moe_routes", routes(values=np.full((3, 1, 2), -1))),
    "floating experts": with_field("moe_routes", routes(values=np.zeros((3, 1, 2)))),
    "no expert counts": with_field("moe_routes", routes(attributes={"layer_ids": (0,)})),
    "a layer too many": with_field("moe_routes", routes(attributes={"layer_ids": (0, 1), "expert_counts": (4,)})),
    "NaN": with_field("entropy", FieldRows(values=np.array([0.5, np.nan]), row_start=2)),
    "infinity": with_field("entropy", FieldRows(values=np.array([0.5, np.inf], np.float32), row_start=2)),
    "beyond float32": with_field("entropy", FieldRows(values=np.array([0.5, 1e39]), row_start=2)),
    "integers for logprobs": with_field("selected_logprobs", FieldRows(values=np.zeros(2, np.int32), row_start=2)),
    "a mask of 2": with_field("sampled_mask", FieldRows(values=np.array([0, 0, 1, 2]))),
    "no ids of the top": with_field("topk_logprobs", FieldRows(values=np.zeros((2, 3), np.float32), row_start=2)),
    "ids of another shape": with_field(
        "topk_logprobs", FieldRows(values=np.zeros((2, 3), np.float32), extra={"token_ids": np.zeros((2, 2), int)}, row_start=2)
    ),
    "a prompt logprob of the first token": with_field("prompt_logprobs", FieldRows(values=np.zeros((2, 1), np.float32))),
    "a kept set without offsets": with_field("kept_set", FieldRows(values=np.zeros(2, np.int32), row_start=2)),
    "offsets that decrease": with_field(
        "kept_set", FieldRows(values=np.zeros(3, np.int32), offsets=np.array([0, 2, 1]), row_start=2)
    ),
    "offsets beyond the values": with_field(
        "kept_set", FieldRows(values=np.zeros(1, np.int32), offsets=np.array([0, 1, 2]), row_start=2)
    ),
    "a kept token that is no int32": with_field(
        "kept_set", FieldRows(values=np.array([2**31, 1]), offsets=np.array([0, 1, 2]), row_start=2)
    ),
    "status of another length": with_field("moe_routes", routes(status=np.zeros(2, np.uint8))),
    "status of 4": with_field("moe_routes", routes(status=np.full(3, 4, np.uint8))),
    "a missing row with values": with_field(
        "moe_routes", routes(values=np.ones((3, 1, 2), int), status=np.array([0, 3, 0], np.uint8))
    ),
    "a plugin's field that does not say executed": with_field("acme.x", FieldRows(values=np.zeros(4))),
    "a plugin's field of objects": with_field("acme.x", FieldRows(values=np.array([None] * 4), executed=False)),
    "a plugin's rows beyond the sequence": with_field("acme.x", FieldRows(values=np.zeros(5), executed=False)),
    "a plugin's attribute of bytes": with_field(
        "acme.x", FieldRows(values=np.zeros(4), executed=False, attributes={"x": b"y"})  # type: ignore[dict-item]
    ),
    "spans with a gap": one(weight_spans=[WeightSpan(0, 1, "a"), WeightSpan(2, 4, "b")]),
    "spans that overlap": one(weight_spans=[WeightSpan(0, 3, "a"), WeightSpan(2, 4, "b")]),
    "spans that end early": one(weight_spans=[WeightSpan(0, 3, "a")]),
    "spans that begin late": one(weight_spans=[WeightSpan(1, 4, "a")]),
    "a temperature of NaN": GenerationRecord(
        choices=one().choices, provenance=Provenance(sampling={"temperature": float("nan")})
    ),
    "a parameter that is None": GenerationRecord(
        choices=one().choices, provenance=Provenance(sampling={"top_k": None})  # type: ignore[dict-item]
    ),
    "a parent of more tokens than the prompt": GenerationRecord(
        choices=one().choices,
        parent=ParentReference(choice_index=0, fields=("token_ids",), header_sha256=bytes(32), sha256=bytes(32), token_count=3),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_the_writer_refuses(name: str) -> None:
    with pytest.raises(ArtifactError) as caught:
        encode_v2(REFUSED[name])
    assert caught.value.code == "artifact_capture_failed" and not isinstance(caught.value, ArtifactCorruptError)


def test_unknown_words() -> None:
    with pytest.raises(ArtifactError, match="codec='lz4'"):
        encode_v2(one(), codec="lz4")  # type: ignore[arg-type]
    with pytest.raises(ArtifactError, match="generation_artifact_v3"):
        encode(A, format="generation_artifact_v3")  # type: ignore[arg-type]
