"""Reading v2 in ranges, deltas with their parents, missing rows, fields of unknown plugins; any size in bounded memory."""

from __future__ import annotations

import errno
import io
import tracemalloc
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from artifact_samples import G1
from artifact_v2_samples import GOLDEN, child_of_g1
from infer.artifacts import decode, encode, open_artifact
from infer.artifacts.byte_source import HEAD_BYTES
from infer.artifacts.record import (
    CAPTURED,
    MISSING,
    RECOMPUTED,
    ChoiceRecord,
    FieldRows,
    GenerationRecord,
    WeightSpan,
)
from infer.artifacts.v2.conversion import record_of
from infer.artifacts.v2.writer import encode_v2, write_v2
from infer.errors import ArtifactCorruptError, ArtifactError, ArtifactFieldMissingError

LAYERS = tuple(range(1, 49))
PROMPT, TOTAL = 3_000, 5_000
ROUTES = np.random.default_rng(7).integers(0, 128, (TOTAL - 1, 48, 8)).astype(np.uint8)
ATTRIBUTES = {"layer_ids": LAYERS, "expert_counts": (128,) * 48}


def long_record(**changes: Any) -> GenerationRecord:
    """2.4 MB of routes, logprobs and kept sets."""
    counts = np.arange(TOTAL - PROMPT) % 5
    fields: dict[str, Any] = {
        "moe_routes": FieldRows(values=ROUTES, attributes=ATTRIBUTES),
        "selected_logprobs": FieldRows(values=np.linspace(-3, 0, TOTAL - PROMPT, dtype=np.float32), row_start=PROMPT),
        "kept_set": FieldRows(
            values=np.arange(counts.sum(), dtype=np.int32), offsets=np.cumsum([0, *counts]), row_start=PROMPT
        ),
    }
    given = {"choice_index": 0, "prompt_token_ids": np.arange(PROMPT), "output_token_ids": np.arange(TOTAL - PROMPT)}
    return GenerationRecord(choices=[ChoiceRecord(**(given | {"fields": fields} | changes))])


class CountingFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """Remembers every range that is asked for."""

    protocol = "counted"
    store: dict[str, Any] = {}  # noqa: RUF012  fsspec's own way
    pseudo_dirs = [""]  # noqa: RUF012
    ranges: list[tuple[int, int]] = []  # noqa: RUF012

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        self.ranges.append((start or 0, end or 0))
        data: bytes = super().cat_file(path, start=start, end=end, **options)
        return data


@pytest.fixture
def counted() -> Any:
    """Puts an object where requests are counted; gives its URL and the list of ranges."""
    fsspec.register_implementation("counted", CountingFileSystem, clobber=True)

    def put(data: bytes) -> tuple[str, list[tuple[int, int]]]:
        with fsspec.open("counted://a.infgen", "wb") as file:
            file.write(data)
        CountingFileSystem.ranges.clear()
        return "counted://a.infgen", CountingFileSystem.ranges

    return put


def span(reader: Any, name: str, choice: int = 0) -> tuple[int, int]:
    """Where the arrays of a field lie."""
    arrays = [a for f in reader.header.fields if f.name == name and choice in f.choices for a in f.arrays.values()]
    return min(a.offset for a in arrays), max(a.offset + a.stored_bytes for a in arrays)


@pytest.mark.row("X-ARTIFACT-V2", "range reads fetch only the named field")
@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_two_requests_fetch_one_field_and_nothing_else(counted: Any, codec: Any) -> None:
    uri, ranges = counted(encode_v2(long_record(), codec=codec).data)
    reader = open_artifact(uri)
    assert ranges == [(0, HEAD_BYTES)]
    for name in ("moe_routes", "selected_logprobs", "token_ids"):
        ranges.clear()
        rows = reader.field(name)
        start, end = span(reader, name)
        assert ranges == [(start, end)]
        assert rows.num_rows == {"moe_routes": TOTAL - 1, "selected_logprobs": TOTAL - PROMPT, "token_ids": TOTAL}[name]
    ranges.clear()
    assert reader.field("kept_set").row(4).tolist() == [6, 7, 8, 9]
    assert len(ranges) == (2 if codec == "none" else 0), "offsets, then values; compressed, they came with the header"


@pytest.mark.row("X-ARTIFACT-V2", "range reads fetch only the named field")
def test_a_slice_of_tokens_and_layers_fetches_only_its_chunks(counted: Any) -> None:
    uri, ranges = counted(encode_v2(long_record(), codec="none").data)
    reader: Any = open_artifact(uri)
    array = next(f.arrays["values"] for f in reader.header.fields if f.name == "moe_routes")
    rows, width = array.chunk_shape[:2]
    assert rows < PROMPT and width < 48, "it is cut both ways"
    ranges.clear()
    found = reader.routes(layers=[LAYERS[width], LAYERS[-1]], tokens=slice(rows + 5, rows + 9))
    assert np.array_equal(found.expert_ids, ROUTES[rows + 5 : rows + 9, [width, 47]])
    assert (found.token_start, found.router_ids, found.expert_counts) == (rows + 5, (LAYERS[width], 48), (128, 128))
    chunk = rows * width * 8
    assert sum(end - start for start, end in ranges) <= 2 * chunk and len(ranges) == 1
    ranges.clear()
    found = reader.routes(layers=[1], tokens=slice(0, PROMPT))
    assert np.array_equal(found.expert_ids, ROUTES[:PROMPT, :1])
    columns = -(-48 // width)
    assert len(ranges) == -(-PROMPT // rows) and sum(e - s for s, e in ranges) <= PROMPT * width * 8
    assert columns > 1
    ranges.clear()
    whole = reader.routes(tokens=slice(PROMPT - 2, PROMPT + 2))
    assert np.array_equal(whole.expert_ids, ROUTES[PROMPT - 2 : PROMPT + 2]), "across the end of the prompt"
    ranges.clear()
    assert len(reader.field("kept_set", tokens=slice(PROMPT + 3, PROMPT + 5)).values) == 7
    assert sum(end - start for start, end in ranges) < 60_000


def test_a_header_beyond_the_first_request(counted: Any) -> None:
    layers = tuple(range(3_000, 9_000))
    attributes = {"layer_ids": layers, "expert_counts": (4,) * 6_000}
    routes = FieldRows(values=np.zeros((1, 6_000, 1), np.uint8), attributes=attributes)
    record = GenerationRecord(
        choices=[
            ChoiceRecord(choice_index=0, prompt_token_ids=[1], output_token_ids=[2], fields={"moe_routes": routes})
        ]
    )
    uri, ranges = counted(encode_v2(record).data)
    assert open_artifact(uri).choices[0].router_ids == layers
    assert len(ranges) == 2 and ranges[1][1] < 40_000


def test_prompt_rows_are_stored_once_for_all_choices() -> None:
    """Equal bytes count, not identity; a choice whose rows differ has its own."""
    one = long_record().choices[0]

    def again(index: int, routes: Any) -> ChoiceRecord:
        fields = dict(one.fields) | {"moe_routes": FieldRows(values=routes, attributes=ATTRIBUTES)}
        return ChoiceRecord(
            choice_index=index,
            prompt_token_ids=list(range(PROMPT)),
            output_token_ids=one.output_token_ids,
            fields=fields,
        )

    other = ROUTES.copy()
    other[5, 5, 5] ^= 1
    single = encode_v2(GenerationRecord(choices=[one]), codec="none")
    both = encode_v2(GenerationRecord(choices=[one, again(1, ROUTES.copy()), again(2, other)]), codec="none")
    output = single.raw_bytes - PROMPT * (8 + 48 * 8)
    assert both.raw_bytes == 3 * output + PROMPT * (8 + 2 * 48 * 8)
    reader = open_artifact(both.data)
    for index, expected in ((0, ROUTES), (1, ROUTES), (2, other)):
        assert np.array_equal(reader.routes(index).expert_ids, expected)
        assert reader.tokens(index).tolist() == [*range(PROMPT), *range(TOTAL - PROMPT)]
    shared = [field.choices for field in reader.fields() if field.scope == "prompt_token"]
    assert shared == [(0, 1), (2,), (0, 1, 2)]


def test_a_delta_is_read_with_its_parent() -> None:
    parent = open_artifact(encode_v2(record_of(G1), codec="none").data)
    data = encode_v2(child_of_g1()).data
    child = open_artifact(data, parent=parent)
    assert child.tokens().tolist() == [101, 102, 201, 202, 103, 301]
    routes = child.routes()
    assert routes.token_start == 0 and np.asarray(routes.expert_ids).tolist() == [
        [[0, 2], [1, 3]], [[1, 2], [0, 3]], [[2, 3], [1, 0]], [[2, 3], [1, 0]], [[3, 1], [2, 0]],
    ]  # fmt: skip
    part = child.routes(layers=[7], tokens=slice(2, 4))
    assert np.asarray(part.expert_ids).tolist() == [[[1, 0]], [[1, 0]]] and part.token_start == 2
    assert child.routes(tokens=slice(0, 2)).token_start == 0
    assert child.routes(tokens=slice(4, None)).token_start == 4
    artifact = child.artifact()
    assert decode(encode(artifact, format="generation_artifact_v1")) == artifact


def test_a_delta_without_its_parent() -> None:
    data = encode_v2(child_of_g1()).data
    child = open_artifact(data)
    assert child.routes().token_start == 3 and child.field("token_ids").row_start == 4
    for step in (child.tokens, child.artifact, lambda: decode(data)):
        with pytest.raises(ArtifactFieldMissingError, match="parent"):
            step()
    assert child.verify().actual_bytes == len(data)
    stranger = open_artifact(encode_v2(GOLDEN["A"]).data)
    for wrong in (stranger, open_artifact(encode(G1))):
        with pytest.raises(ArtifactError, match="parent"):
            open_artifact(data, parent=wrong)
    with pytest.raises(ArtifactError, match="parent"):
        open_artifact(encode(G1), parent=stranger)


def test_a_chain_of_deltas_is_the_whole_conversation() -> None:
    """Three turns; a child stores only rows that its parent lacks, kinds of rows of the prompt as well as of the answer."""
    tokens, readers, sizes = list(range(100, 110)), [], []
    reference = None
    mask = np.zeros(0, np.uint8)
    for turn in range(3):
        output = [500 + turn, 600 + turn]
        mask = np.concatenate([mask, np.zeros(len(tokens) - len(mask), np.uint8), np.ones(2, np.uint8)])
        routes = np.arange(len(tokens) + 1, dtype=np.int64).reshape(-1, 1, 1)
        fields: dict[str, Any] = {
            "moe_routes": FieldRows(values=routes, attributes={"layer_ids": (2,), "expert_counts": (99,)}),
            "sampled_mask": FieldRows(values=mask),
            "selected_logprobs": FieldRows(values=np.full(2, -turn, np.float32), row_start=len(tokens)),
        }
        record = GenerationRecord(
            choices=[ChoiceRecord(choice_index=3, prompt_token_ids=tokens, output_token_ids=output, fields=fields)],
            parent=reference,
        )
        encoded = encode_v2(record, codec="none")
        readers.append(open_artifact(encoded.data, parent=readers[-1] if readers else None))
        sizes.append(encoded.raw_bytes)
        tokens = [*tokens, *output]
        reference = encoded.reference(
            token_count=len(tokens), fields=("token_ids", "moe_routes", "sampled_mask"), choice_index=3
        )
        tokens = [*tokens, 700 + turn]
    assert sizes[1:] == [3 * (8 + 1 + 1) + 2 * 4] * 2
    last = readers[-1]
    assert last.tokens().tolist() == tokens[:-1]
    assert np.asarray(last.routes().expert_ids).ravel().tolist() == list(range(len(tokens) - 2))
    assert last.field("sampled_mask").values.tolist() == [0] * 10 + [1, 1, 0, 1, 1, 0, 1, 1]
    assert last.field("sampled_mask", tokens=slice(11, 14)).values.tolist() == [1, 0, 1]
    assert last.logprobs().token_start == 16
    assert decode(encode(last.artifact())) == last.artifact()


def test_a_missing_row_is_never_a_route() -> None:
    status = np.array([CAPTURED, RECOMPUTED, MISSING], np.uint8)
    ids = np.array([[[1]], [[2]], [[0]]])
    routes = FieldRows(values=ids, status=status, attributes={"layer_ids": (0,), "expert_counts": (3,)})
    record = GenerationRecord(
        choices=[
            ChoiceRecord(
                choice_index=0, prompt_token_ids=[1, 2], output_token_ids=[3, 4], fields={"moe_routes": routes}
            )
        ]
    )
    reader = open_artifact(encode_v2(record).data)
    with pytest.raises(ArtifactFieldMissingError, match="1 rows of moe_routes are missing"):
        reader.routes()
    with pytest.raises(ArtifactFieldMissingError, match="missing"):
        reader.artifact()
    assert reader.routes(tokens=slice(0, 2)).expert_ids.tolist() == [[[1]], [[2]]]  # type: ignore[union-attr]
    rows = reader.field("moe_routes")
    assert not rows.complete and rows.status is not None and rows.status.tolist() == [0, 2, 3]
    assert reader.verify()


@pytest.mark.row("X-ARTIFACT-V2", "any field")
def test_a_field_of_an_unknown_plugin_is_listed_checked_and_skipped() -> None:
    data = encode_v2(GOLDEN["N"], codec="none").data
    reader = open_artifact(data)
    listed = {field.name: field for field in reader.fields() if not field.known}
    assert sorted(listed) == ["acme-probes.summary", "acme-probes.surprise"]
    assert listed["acme-probes.summary"].scope == "request" and listed["acme-probes.surprise"].dtype == "i16"
    assert reader.field("acme-probes.surprise", 1).values.tolist() == [0, 1, 2, 3]
    assert reader.field("acme-probes.summary", 1).values.tolist() == [[1.5], [2.5]]
    assert reader.artifact().choices[0].moe_routes is not None
    position = span(reader, "acme-probes.summary")[0]
    damaged = bytearray(data)
    damaged[position] ^= 1
    with pytest.raises(ArtifactCorruptError, match="SHA-256"):
        open_artifact(damaged).verify()
    assert open_artifact(damaged).routes(0)


@pytest.mark.row("X-ARTIFACT-V2", "provenance")
def test_provenance_finish_reasons_and_spans() -> None:
    reader = open_artifact(encode_v2(GOLDEN["N"]).data)
    assert reader.provenance == GOLDEN["N"].provenance
    assert reader.provenance is not None and reader.provenance.sampling["stop"] == ("\n",)
    assert [(choice.finish_reason, choice.seed) for choice in reader.choices] == [("length", 40), ("stop", 41)]
    assert reader.weight_spans(1) == (WeightSpan(0, 3, "step-8"), WeightSpan(3, 4, "step-9"))
    assert open_artifact(encode(G1)).provenance is None


def test_both_formats_are_read_the_same_way() -> None:
    first, second = (
        open_artifact(encode(G1, format=name)) for name in ("generation_artifact_v1", "generation_artifact_v2")
    )  # type: ignore[arg-type]
    assert (first.format, second.format) == ("generation_artifact_v1", "generation_artifact_v2")
    for reader in (first, second):
        assert reader.artifact() == G1
        assert reader.field("token_ids", tokens=slice(1, 3)).values.tolist() == [102, 201]
        assert reader.field("moe_routes", layers=[7]).attributes == {"layer_ids": (7,), "expert_counts": (4,)}
        assert reader.field("selected_logprobs").row_start == 2
        assert {field.name for field in reader.fields()} == {"token_ids", "moe_routes", "selected_logprobs"}
        for name in ("entropy", "acme.x"):
            with pytest.raises(ArtifactFieldMissingError, match=name):
                reader.field(name)
        for step in (
            lambda: reader.field("token_ids", layers=[1]),  # noqa: B023  called here
            lambda: reader.routes(layers=[2]),  # noqa: B023
            lambda: reader.tokens(1),  # noqa: B023
        ):
            with pytest.raises(ArtifactFieldMissingError):
                step()
        with pytest.raises(ArtifactError):
            reader.routes(tokens=slice(0, 3, 2))


@pytest.mark.row("X-ARTIFACT-V2", "more than 64 MiB")
def test_70_mib_are_written_verified_and_sliced_in_bounded_memory(tmp_path: Path) -> None:
    """Beside the captured rows the writer holds one chunk, and a reader what was asked for."""
    total = 191_200
    pattern = np.random.default_rng(1).integers(0, 128, (1 << 16, 48, 8)).astype(np.uint8)
    pieces = [FieldRows(values=pattern, row_start=n << 16, attributes=ATTRIBUTES) for n in range(2)]
    last = total - 1 - (2 << 16)
    pieces.append(FieldRows(values=pattern[:last], row_start=2 << 16, attributes=ATTRIBUTES))
    record = GenerationRecord(
        choices=[
            ChoiceRecord(
                choice_index=0,
                prompt_token_ids=np.arange(190_000),
                output_token_ids=np.arange(total - 190_000),
                fields={"moe_routes": pieces},
            )
        ]
    )
    path = tmp_path / "large.infgen"
    tracemalloc.start()
    with path.open("wb") as file:
        written = write_v2(record, file, codec="none")
    writing = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    reader = open_artifact(path)
    found = reader.verify(sha256=written.sha256, actual_bytes=path.stat().st_size)
    part = reader.routes(layers=[7], tokens=slice(150_000, 150_100))
    reading = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert written.raw_bytes > 70 * 2**20 and written.header_bytes < 2**16
    assert found.body_sha256 == written.body_sha256
    assert np.array_equal(part.expert_ids, pattern[np.arange(150_000, 150_100) & 0xFFFF, 6:7])
    assert writing < 2 * 2**20 and reading < 10 * 2**20


def test_nothing_is_written_of_a_record_that_is_not_sound() -> None:
    """Not even where the fault is in the last chunk."""
    routes = ROUTES.copy()
    routes[-1, -1, -1] = 200
    out = io.BytesIO()
    with pytest.raises(ArtifactError, match="expert id 200"):
        write_v2(long_record(fields={"moe_routes": FieldRows(values=routes, attributes=ATTRIBUTES)}), out)
    assert out.getvalue() == b""


def test_a_full_disk_under_the_spool_is_said() -> None:
    class Full(io.BytesIO):
        def write(self, data: Any, /) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    out = io.BytesIO()
    with pytest.raises(ArtifactError, match="No space left") as caught:
        write_v2(long_record(), out, spool=Full())
    assert caught.value.code == "artifact_capture_failed" and out.getvalue() == b""


def test_bfloat16_is_kept_bit_for_bit() -> None:
    import torch

    states = torch.randn(3, 2, 4).to(torch.bfloat16)
    rows = FieldRows(values=states.view(torch.uint16).numpy(), bfloat16=True, attributes={"layer_ids": (0, 3)})
    record = GenerationRecord(
        choices=[
            ChoiceRecord(
                choice_index=0, prompt_token_ids=[1, 2], output_token_ids=[3, 4], fields={"hidden_states": rows}
            )
        ]
    )
    found = open_artifact(encode_v2(record).data).field("hidden_states", layers=[3])
    assert found.bfloat16
    assert torch.equal(torch.from_numpy(found.values.copy()).view(torch.bfloat16), states[:, 1:])
