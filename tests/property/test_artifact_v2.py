"""Format v2: whatever a record holds reads back the same, in slices too; v1 and v2 of one generation agree bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifact_samples import artifacts
from artifact_v2_samples import independent_read_v2, records
from infer.artifacts import GenerationArtifact, decode, encode, open_artifact
from infer.artifacts.record import FieldRows, GenerationRecord
from infer.artifacts.v2.bounds import ArrayBound, FieldBound, bound_v2, field_bound
from infer.artifacts.v2.writer import EncodedV2, encode_v2

CODECS = ("none", "zstd")
V2 = "generation_artifact_v2"


@pytest.mark.row("X-ARTIFACT-V2", "v1 and v2 of one generation agree bit for bit")
@given(artifact=artifacts(), codec=st.sampled_from(CODECS))
def test_v1_and_v2_of_one_generation_agree_bit_for_bit(artifact: GenerationArtifact, codec: Any) -> None:
    """Either way round: v1 to v2 to v1 gives the same bytes, and so does v2 to v1 to v2."""
    first, second = encode(artifact, codec), encode(artifact, codec, format=V2)
    one, other = decode(first), decode(second)
    assert one == other == artifact
    for mine, theirs in zip(one.choices, other.choices, strict=True):
        ids: Any = (mine.sequence_token_ids, theirs.sequence_token_ids)
        assert ids[0].dtype == ids[1].dtype and ids[0].tobytes() == ids[1].tobytes()
        if mine.selected_logprobs is not None and theirs.selected_logprobs is not None:
            values: Any = (mine.selected_logprobs.logprobs, theirs.selected_logprobs.logprobs)
            assert values[0].dtype == values[1].dtype and values[0].tobytes() == values[1].tobytes()
    assert encode(other, codec) == first
    assert encode(one, codec, format=V2) == second


@given(artifact=artifacts(), codec=st.sampled_from(CODECS))
def test_what_was_read_is_written_again_as_it_was(artifact: GenerationArtifact, codec: Any) -> None:
    data = encode(artifact, codec, format=V2)
    reader: Any = open_artifact(data)
    again = encode_v2(reader.record(), codec=codec)
    assert again.data == data
    assert reader.verify(sha256=again.sha256, actual_bytes=len(data)).body_sha256 == again.body_sha256
    other = encode_v2(reader.record(), codec="none" if codec == "zstd" else "zstd")
    assert other.body_sha256 == again.body_sha256
    for choice in artifact.choices:
        assert np.array_equal(reader.tokens(choice.choice_index), choice.sequence_token_ids)


@given(record=records(), codec=st.sampled_from(CODECS), chunk_bytes=st.sampled_from([1, 16, 100, 2**18]))
def test_any_record_reads_back_and_within_its_bound(record: GenerationRecord, codec: Any, chunk_bytes: int) -> None:
    """Here and in a reader of its own, in one chunk or in many."""
    encoded = encode_v2(record, codec=codec, chunk_bytes=chunk_bytes)
    reader: Any = open_artifact(encoded.data)
    found = reader.verify(sha256=encoded.sha256, actual_bytes=encoded.actual_bytes)
    assert found.body_sha256 == encoded.body_sha256
    assert encode_v2(reader.record(), codec=codec, chunk_bytes=chunk_bytes).data == encoded.data
    header = independent_read_v2(encoded.data)
    assert header["limits"]["decoded_bytes"] == encoded.raw_bytes
    for choice in record.choices:
        index = choice.choice_index
        tokens = [*choice.prompt_token_ids, *choice.output_token_ids]
        assert reader.tokens(index).tolist() == tokens
        if choice.weight_spans:
            assert list(reader.weight_spans(index)) == list(choice.weight_spans)
        for name, given_rows in choice.fields.items():
            pieces = given_rows if isinstance(given_rows, list) else [given_rows]
            rows = reader.field(name, index)
            assert rows.row_start == pieces[0].row_start and rows.num_rows == sum(piece.num_rows for piece in pieces)
            assert listed(rows) == [row for piece in pieces for row in listed(piece)]
            mine = [
                field["arrays"]["values"]["data"]
                for field in header["fields"]
                if field["name"] == name and index in field["choices"]
            ]
            assert np.concatenate(mine).tolist() == np.asarray(rows.values).tolist()
    check_bound(record, encoded, chunk_bytes)


def listed(rows: FieldRows) -> list[Any]:
    return [
        np.asarray(rows.row(index), dtype=float if rows.values.dtype.kind == "f" else None).tolist()
        for index in range(rows.num_rows)
    ]


def check_bound(record: GenerationRecord, encoded: EncodedV2, chunk_bytes: int) -> None:
    layers = {"moe_routes": (1, 4, 2), "hidden_states": (0, 5), "indexer_topk": (9,)}
    fields = []
    names = {name for choice in record.choices for name in choice.fields}
    names |= {"weight_spans"} if any(choice.weight_spans for choice in record.choices) else set()
    for name in names:
        if "." in name:
            array = {"values": ArrayBound(dtype="f64", row_shape=(2,))}
            if name.endswith("words"):
                array = {
                    "values": ArrayBound(dtype="u16", row_shape=(2,), per_row=2),
                    "offsets": ArrayBound(dtype="i64"),
                }
            steps = 2 if name.endswith("steps") else None
            fields.append(
                FieldBound(name=name, arrays=array, rows=steps, attributes={"rate": 0.5, "names": ("x", "y")})
            )
            continue
        width = {"moe_routes": 2, "hidden_states": 3, "indexer_topk": 4}.get(name, 0)
        most = {"kept_set": 3, "topk_logprobs": 2}.get(name, 0)
        fields.append(
            field_bound(
                name, layer_ids=layers.get(name, ()), expert_counts=(302,) * 3, width=width, most=most, versions=2
            )
        )
    bound = bound_v2(
        fields,
        prompt_tokens=len(record.choices[0].prompt_token_ids),
        max_tokens=max(len(choice.output_token_ids) for choice in record.choices),
        num_choices=len(record.choices),
        shared_prompt=False,
        provenance=record.provenance,
        chunk_bytes=chunk_bytes,
    )
    assert encoded.header_bytes <= bound.header_bytes
    assert encoded.raw_bytes <= bound.raw_bytes
    assert encoded.actual_bytes <= bound.object_bytes


@given(record=records(), data=st.data())
def test_a_slice_is_what_the_whole_has_there(record: GenerationRecord, data: st.DataObject) -> None:
    reader: Any = open_artifact(encode_v2(record, chunk_bytes=24).data)
    choice = data.draw(st.sampled_from(record.choices))
    name = data.draw(st.sampled_from(["token_ids", *sorted(choice.fields)]))
    whole = reader.field(name, choice.choice_index)
    if whole.axis == "request":
        return
    low, high = sorted(data.draw(st.lists(st.integers(0, 14), min_size=2, max_size=2)))
    layers: Any = whole.attributes.get("layer_ids")
    chosen = data.draw(st.lists(st.sampled_from(layers), min_size=1, max_size=3)) if layers else None
    part = reader.field(name, choice.choice_index, tokens=slice(low, high), layers=chosen)
    first, last = max(low, whole.row_start), max(low, whole.row_start, min(high, whole.row_end))
    assert (part.row_start, part.row_end) == (first, last) or (not part.num_rows and first >= last)
    columns = slice(None) if chosen is None else [layers.index(layer) for layer in chosen]
    for position in range(part.row_start, part.row_end):
        mine, theirs = part.row(position - part.row_start), whole.row(position - whole.row_start)
        assert mine.tolist() == (theirs if chosen is None else theirs[columns]).tolist()
    if part.status is not None:
        assert part.status.tolist() == whole.status[first - whole.row_start : last - whole.row_start].tolist()
    if chosen is not None:
        assert part.attributes["layer_ids"] == tuple(chosen)
