"""Reading what is asked for and no more, from bytes, files and any fsspec URL; damage is found when it is met."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch

from artifact_samples import G1, A
from infer.artifacts import ArtifactChoice, GenerationArtifact, RoutedExperts, SelectedLogprobs, encode, open_artifact
from infer.artifacts.byte_source import HEAD_BYTES
from infer.artifacts.exporters import to_torch
from infer.artifacts.v1.encoder import encode_v1
from infer.errors import ArtifactCorruptError, ArtifactError, ArtifactFieldMissingError, StorageNotFoundError

IDS = np.random.default_rng(3).integers(0, 300, (196, 3, 4))
LARGE = GenerationArtifact(
    [
        ArtifactChoice(0, 3, [1, 2, 3, 4]),
        ArtifactChoice(
            5,
            100,
            np.arange(200),
            RoutedExperts(3, IDS, (1, 4, 7), (300,) * 3),
            SelectedLogprobs(100, np.linspace(-3, 0, 100)),
        ),
    ]
)


@pytest.fixture(params=["none", "zstd"])
def data(request: pytest.FixtureRequest) -> bytes:
    return encode(LARGE, request.param)


def test_the_manifest_comes_first(data: bytes) -> None:
    first, second = open_artifact(data).choices
    assert (first.choice_index, first.num_tokens, first.contents, first.router_ids) == (0, 4, (), ())
    assert (second.choice_index, second.prompt_token_count, second.num_tokens) == (5, 100, 200)
    assert second.contents == ("moe_routes", "selected_logprobs")
    assert (second.route_start, second.routes_shape, second.routes_dtype) == (3, (196, 3, 4), "u16")


def test_whole_contents(data: bytes) -> None:
    reader = open_artifact(data)
    assert reader.artifact() == LARGE
    assert reader.tokens(0).tolist() == [1, 2, 3, 4]
    assert reader.tokens(5).tolist() == list(range(200))
    assert reader.routes(5) == LARGE.choices[1].moe_routes
    assert reader.logprobs(5) == LARGE.choices[1].selected_logprobs


@pytest.mark.parametrize(
    ("tokens", "first", "last"),
    [
        (slice(3, 199), 0, 196),
        (slice(0, 10), 0, 7),
        (slice(50, 60), 47, 57),
        (slice(198, 500), 195, 196),
        (slice(-9, None), 187, 196),
        (slice(60, 50), 57, 57),
        (slice(0, 2), 0, 0),
    ],
)
def test_slices(data: bytes, tokens: slice, first: int, last: int) -> None:
    found = open_artifact(data).routes(5, tokens=tokens, layers=[7, 1])
    assert np.array_equal(found.expert_ids, IDS[first:last, [2, 0]])
    assert (found.token_start, found.router_ids, found.expert_counts) == (3 + first, (7, 1), (300, 300))


def test_a_slice_keeps_nothing_else_alive(data: bytes) -> None:
    """RE-53."""
    ids = np.asarray(open_artifact(data).routes(5, tokens=slice(50, 60)).expert_ids)
    base: Any = ids
    while getattr(base, "base", None) is not None:
        base = base.base
    held = base.obj if isinstance(base, memoryview) else base
    assert (len(held) if isinstance(held, bytes) else held.nbytes) <= max(ids.nbytes, len(data) if held is data else 0)
    assert ids.nbytes == 10 * 3 * 4 * 2 and not ids.flags.writeable


def test_what_is_not_there(data: bytes) -> None:
    reader = open_artifact(data)
    for step in (
        lambda: reader.routes(0),
        lambda: reader.logprobs(0),
        lambda: reader.tokens(1),
        lambda: reader.routes(5, layers=[2]),
    ):
        with pytest.raises(ArtifactFieldMissingError):
            step()
    with pytest.raises(ArtifactError):
        reader.routes(5, tokens=slice(0, 10, 2))
    one: Any = 3
    with pytest.raises(ArtifactError, match=r"tokens=slice\(first, end\)"):
        reader.routes(5, tokens=one)


def test_only_the_ranges_that_are_needed_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RE-52: from an uncompressed object; nothing else is materialised."""
    ids = np.random.default_rng(4).integers(0, 300, (19_999, 3, 4))
    longer = GenerationArtifact(
        [ArtifactChoice(0, 100, np.arange(20_000), RoutedExperts(0, ids, (1, 4, 7), (300,) * 3))]
    )
    path = tmp_path / "a.dynexp"
    path.write_bytes(encode(longer, "none"))
    filesystem = fsspec.filesystem("file")
    fetched: list[int] = []
    original = type(filesystem).cat_file

    def watch(self: Any, path: str, start: int, end: int, **options: Any) -> Any:
        fetched.append(end - start)
        return original(self, path, start=start, end=end, **options)

    monkeypatch.setattr(type(filesystem), "cat_file", watch)
    reader = open_artifact(path)
    assert fetched == [HEAD_BYTES]
    found = reader.routes(tokens=slice(5000, 5010))
    assert fetched == [HEAD_BYTES, 10 * 3 * 4 * 2]
    assert np.array_equal(found.expert_ids, ids[5000:5010])


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_from_anywhere(tmp_path: Path, codec: Any) -> None:
    data = encode(LARGE, codec)
    path = tmp_path / "a.dynexp"
    path.write_bytes(data)
    with fsspec.open("memory://reader/a.dynexp", "wb") as file:
        file.write(data)
    for source in (path, str(path), f"file://{path}", "memory://reader/a.dynexp", bytearray(data), memoryview(data)):
        assert open_artifact(source).routes(5) == LARGE.choices[1].moe_routes
    with pytest.raises(StorageNotFoundError):
        open_artifact(tmp_path / "absent")
    with pytest.raises(StorageNotFoundError):
        open_artifact("memory://reader/absent")
    with pytest.raises(StorageNotFoundError, match="PROFILE:KEY"):
        open_artifact("runs:job-7/0001.dynexp")


def test_verify() -> None:
    encoded = encode_v1(G1, "zstd")
    reader = open_artifact(encoded.data)
    found = reader.verify(sha256=encoded.sha256.upper(), actual_bytes=len(encoded.data))
    assert (found.sha256, found.body_sha256) == (encoded.sha256, encoded.body_sha256)
    assert open_artifact(encode(G1, "none")).verify().body_sha256 == encoded.body_sha256
    with pytest.raises(ArtifactCorruptError, match="SHA-256"):
        reader.verify(sha256="0" * 64)
    with pytest.raises(ArtifactCorruptError, match="bytes"):
        reader.verify(actual_bytes=1)


def test_damage_is_found_when_it_is_met(data: bytes) -> None:
    """BR-19: an object cut anywhere cannot even be opened, or fails as soon as its tensors are read."""
    for end in range(0, len(data), 97):
        with pytest.raises(ArtifactCorruptError):
            open_artifact(data[:end]).tokens(5)


def test_a_wrong_value_in_a_slice_is_found() -> None:
    data = bytearray(encode(G1, "none"))
    data[-9] = 9  # an expert id of 4
    reader = open_artifact(data)
    with pytest.raises(ArtifactCorruptError, match="expert id 9"):
        reader.routes()
    assert np.asarray(reader.routes(tokens=slice(0, 1)).expert_ids).tolist() == [[[0, 2], [1, 3]]]


def test_a_manifest_beyond_the_first_read(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = tuple(range(40_000))
    many = GenerationArtifact(
        [ArtifactChoice(0, 1, [1, 2], RoutedExperts(0, np.zeros((1, 40_000, 1), np.uint8), layers, (8,) * 40_000))]
    )
    for codec in ("none", "zstd"):
        assert open_artifact(encode(many, codec)).choices[0].router_ids == layers  # type: ignore[arg-type]


def test_torch() -> None:
    """RE-31: uint16 is widened; the tensor is its own."""
    reader = open_artifact(encode(LARGE, "none"))
    tensor = to_torch(reader.routes(5).expert_ids)  # type: ignore[arg-type]
    assert tensor.dtype == torch.int32 and torch.equal(tensor, torch.from_numpy(IDS.astype(np.int32)))
    tensor += 1
    assert to_torch(reader.tokens(5)).dtype == torch.int64
    assert to_torch(np.asarray(reader.logprobs(5).logprobs)).dtype == torch.float32
    assert to_torch(np.asarray(open_artifact(encode(G1)).routes().expert_ids)).dtype == torch.uint8
    assert open_artifact(encode(A)).tokens().tolist() == [101, 201]
