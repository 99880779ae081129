"""How readers meet a careless caller: an open choice, one layer, a closed reader, a URL that holds a secret."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from artifact_samples import G1
from infer.artifacts import ArtifactChoice, GenerationArtifact, RoutedExperts, SelectedLogprobs, encode, open_artifact
from infer.errors import (
    ArtifactError,
    ArtifactFieldMissingError,
    StorageError,
    StorageNotFoundError,
    StorageUnavailableError,
)
from put_server import answer, put_server, status

FORMATS = ("generation_artifact_v1", "generation_artifact_v2")
IDS = np.arange(18).reshape(3, 3, 2) % 8


def choice(index: int) -> ArtifactChoice:
    routes = RoutedExperts(0, (IDS + index) % 8, (1, 4, 7), (8,) * 3)
    return ArtifactChoice(index, 2, [5, 6, 7, 8], routes, SelectedLogprobs(2, [-0.5, -1.0]))


TWO = GenerationArtifact([choice(0), choice(3)])
CALLS: dict[str, Any] = {
    "routes": lambda reader, **which: reader.routes(**which),
    "tokens": lambda reader, **which: reader.tokens(**which),
    "logprobs": lambda reader, **which: reader.logprobs(**which),
    "field": lambda reader, **which: reader.field("moe_routes", **which),
}


@pytest.fixture(params=FORMATS)
def data(request: pytest.FixtureRequest) -> bytes:
    return encode(TWO, format=request.param)


@pytest.mark.parametrize("name", CALLS)
def test_one_of_several_choices_is_never_taken_in_silence(data: bytes, name: str) -> None:
    reader = open_artifact(data)
    with pytest.raises(ArtifactFieldMissingError, match=r"choices \[0, 3\]: say which one, such as choice=0"):
        CALLS[name](reader)
    with pytest.raises(ArtifactFieldMissingError, match=r"no choice 1; there are \[0, 3\]"):
        CALLS[name](reader, choice=1)
    assert CALLS[name](reader, choice=3) is not None


@pytest.mark.parametrize("name", FORMATS)
def test_the_only_choice_needs_no_name(name: Any) -> None:
    reader = open_artifact(encode(G1, format=name))
    assert reader.routes() == reader.routes(0)


def test_one_layer_is_a_number(data: bytes) -> None:
    reader = open_artifact(data)
    for layer in (4, np.int64(4)):
        found = reader.routes(0, layers=layer)
        assert found.router_ids == (4,) and np.array_equal(found.expert_ids, IDS[:, 1:2])
        assert reader.field("moe_routes", 0, layers=layer).values.shape == (3, 1, 2)
    layers: Any
    for layers in ("4", 1.5, [1.5], [None], ["4"], b"\x04"):
        with pytest.raises(ArtifactError, match=r"layers=.*give a decoder layer, such as layers=1"):
            reader.routes(0, layers=layers)
    with pytest.raises(ArtifactFieldMissingError, match="layer 2 "):
        reader.routes(0, layers=2)


def test_a_reader_says_what_it_holds(data: bytes) -> None:
    shown = repr(open_artifact(data))
    assert shown.startswith("<V") and f"{len(data)} bytes" in shown and "generation_artifact_v" in shown
    assert "choice 0: 2 + 2 tokens, moe_routes, selected_logprobs; choice 3: 2 + 2 tokens" in shown
    many = repr(open_artifact(encode(GenerationArtifact([ArtifactChoice(n, 1, [1, 2]) for n in range(300)]))))
    assert "; 296 more>" in many and len(many) < 400


def test_a_reader_is_closed_with_its_block(data: bytes) -> None:
    with open_artifact(data) as reader:
        held = reader.routes(3)
    assert np.array_equal(held.expert_ids, (IDS + 3) % 8), "what was handed out stays"
    assert reader.choices[1].choice_index == 3 and "choice 3" in repr(reader)
    for step in (lambda: reader.routes(3), lambda: reader.tokens(0), reader.artifact, reader.verify):
        with pytest.raises(ArtifactError, match="was closed"):
            step()
    reader.close()
    with pytest.raises(ZeroDivisionError), open_artifact(data):
        raise ZeroDivisionError


class SignedFiles(fsspec.AbstractFileSystem):
    """As clients of HTTP do, its errors quote the whole URL."""

    protocol = "signed"
    cachable = False

    def info(self, path: str, **options: Any) -> Any:
        if "absent" in path:
            raise FileNotFoundError(path)
        raise PermissionError(f"403, message='Forbidden', url='{path}'")

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return path


@pytest.fixture
def signed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules["fsspec.registry"].__dict__["_registry"], "signed", SignedFiles)


@pytest.mark.usefixtures("signed")
@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("signed://bucket/a.dynexp?X-Signature=SECRET&x=/y@z", "signed://bucket/a.dynexp?..."),
        ("signed://user:SECRET@host/a.dynexp", "signed://host/a.dynexp"),
        ("signed://user:SECRET@host/absent?key=SECRET", "signed://host/absent?..."),
    ],
)
def test_what_a_url_hides_is_in_no_error(uri: str, shown: str) -> None:
    with pytest.raises(StorageError) as caught:
        open_artifact(uri)
    assert shown in str(caught.value) and "SECRET" not in str(caught.value)
    assert caught.value.__suppress_context__ and caught.value.__cause__ is None
    expected = StorageNotFoundError if "absent" in uri else StorageUnavailableError
    assert isinstance(caught.value, expected)


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (status(404), StorageNotFoundError),
        (status(403), StorageUnavailableError),
        (status(500), StorageUnavailableError),
        (None, StorageUnavailableError),
    ],
    ids=["404", "403", "500", "nobody listens"],
)
def test_over_http_only_what_is_not_there_does_not_exist(reply: bytes | None, expected: type[StorageError]) -> None:
    with put_server(*[answer(reply or b"")] * 9) as server:
        url = server.url("/a.dynexp?sig=SECRET")
        if reply is not None:
            with pytest.raises(StorageError) as caught:
                open_artifact(url)
    if reply is None:
        with pytest.raises(StorageError) as caught:
            open_artifact(url)
    assert type(caught.value) is expected and "SECRET" not in str(caught.value)
    told = "does not exist" if expected is StorageNotFoundError else "cannot be opened (Client"
    assert told in str(caught.value)


@pytest.mark.usefixtures("signed")
def test_without_a_secret_the_reason_is_told() -> None:
    with pytest.raises(
        StorageUnavailableError, match=r"signed://host/a cannot be opened \(PermissionError: 403"
    ) as caught:
        open_artifact("signed://host/a")
    assert isinstance(caught.value.__cause__, PermissionError)


def test_a_path_is_shown_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(StorageNotFoundError, match=r"what\?@this"):
        open_artifact(tmp_path / "what?@this")


def test_more_than_memory_holds_is_said_and_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = open_artifact(encode(TWO, format="generation_artifact_v2"))
    empty = np.empty

    def scarce(shape: Any, dtype: Any = float) -> Any:
        if np.prod(shape) > 4:
            raise MemoryError
        return empty(shape, dtype)

    monkeypatch.setattr("infer.artifacts.v2.ranges.np.empty", scarce)
    with pytest.raises(ArtifactError, match=r"shape \(2, 3, 2\) and u8 does not fit in memory: read it in parts"):
        reader.routes(0)
    assert np.array_equal(reader.routes(0, layers=4, tokens=slice(1, 3)).expert_ids, IDS[1:3, 1:2])
