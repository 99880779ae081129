"""The URL source over fsspec's own memory and file filesystems."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.registry import _registry

from infer.errors import ModelError
from infer.plugins.model_cache import list_entries
from infer.plugins.model_source import Progress
from infer.sources.fsspec_url import create


@pytest.fixture
def bucket() -> Iterator[Any]:
    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    yield filesystem
    filesystem.store.clear()


def ignore(_: Progress) -> None:
    return None


def test_a_gguf_is_copied_once(bucket: Any, tmp_path: Path, seen: list[Progress]) -> None:
    bucket.pipe("/models/tiny.gguf", b"GGUF" * 1000)
    found = create(tmp_path, False, None).resolve("memory://models/tiny.gguf", seen.append)
    assert found.path.read_bytes() == b"GGUF" * 1000 and found.path.is_relative_to(tmp_path)
    assert [(r.stage, r.done, r.total) for r in seen[:1]] == [("download", 4000, 4000)]
    bucket.store.clear()
    again = create(tmp_path, True, None).resolve("memory://models/tiny.gguf", ignore)
    assert (again.path, again.identity) == (found.path, found.identity)


def test_a_directory_brings_what_a_checkpoint_needs(bucket: Any, tmp_path: Path) -> None:
    for name in ("config.json", "a.safetensors", "tokenizer.json", "evil.py", "optimizer.pt"):
        bucket.pipe(f"/m/{name}", b"x")
    found = create(tmp_path, False, None).resolve("memory://m/", ignore)
    assert sorted(path.name for path in found.path.iterdir()) == ["a.safetensors", "config.json", "tokenizer.json"]


def test_identity_is_of_the_content(bucket: Any, tmp_path: Path) -> None:
    identities = []
    for url, content in (("a", b"one"), ("b", b"one"), ("c", b"two")):
        bucket.pipe(f"/{url}/m.gguf", content)
        identities.append(create(tmp_path, False, None).resolve(f"memory://{url}/m.gguf", ignore).identity)
    assert identities[0] == identities[1] != identities[2]


def test_local_files_are_used_in_place(checkpoint: Path, tmp_path: Path) -> None:
    found = create(tmp_path / "cache", True, None).resolve(f"file://{checkpoint}", ignore)
    assert found.path == checkpoint
    with pytest.raises(ModelError, match="no such file"):
        create(tmp_path, True, None).resolve("file:///nothing/here", ignore)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("memory://m/nothing", "does not exist"),
        ("memory://m/readme.txt", r"does not end in \.gguf"),
        ("memory://m", "holds no model"),
        ("nosuchscheme://x/y", "cannot be opened.*nosuchscheme"),
    ],
)
def test_messages(bucket: Any, tmp_path: Path, url: str, said: str) -> None:
    bucket.pipe("/m/readme.txt", b"x")
    with pytest.raises(ModelError, match=said) as caught:
        create(tmp_path, False, None).resolve(url, ignore)
    assert url in str(caught.value)
    assert list_entries(tmp_path) == []


def test_a_missing_filesystem_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)  # as if it were not installed
    for protocol in ("s3", "s3a"):
        monkeypatch.delitem(_registry, protocol, raising=False)
    with pytest.raises(ModelError, match=r"infer-engine\[s3\]"):
        create(tmp_path, False, None).resolve("s3://bucket/model", ignore)


def test_offline_refuses_what_needs_a_network(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="offline mode is on"):
        create(tmp_path, True, None).resolve("https://example.invalid/m.gguf", ignore)


def test_a_short_copy_is_not_an_entry(bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.pipe("/m.gguf", b"GGUF" * 10)
    honest = type(bucket).info
    monkeypatch.setattr(type(bucket), "info", lambda self, path, **k: {**honest(self, path, **k), "size": 41})
    with pytest.raises(ModelError, match="41 bytes and 40 arrived"):
        create(tmp_path, False, None).resolve("memory://m.gguf", ignore)
    assert list_entries(tmp_path) == []
