"""The local source: what counts as a model, identity, messages."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from infer.errors import ModelError
from infer.sources.local import create


def ignore(_: object) -> None:
    return None


def test_a_checkpoint_directory_is_used_in_place(checkpoint: Path, tmp_path: Path) -> None:
    found = create(tmp_path / "cache", False, None).resolve(str(checkpoint), ignore)
    assert found.path == checkpoint
    assert not (tmp_path / "cache").exists()


def test_a_directory_with_one_gguf_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    source = create(tmp_path, False, None)
    assert source.resolve(str(tmp_path), ignore).path == tmp_path / "m.gguf"
    assert source.resolve(str(tmp_path / "m.gguf"), ignore).path == tmp_path / "m.gguf"


def test_two_ggufs_are_a_question_back(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"2 models \(a\.gguf, b\.gguf\)"):
        create(tmp_path, False, None).resolve(str(tmp_path), ignore)


def test_matches_only_what_exists(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = create(tmp_path, False, None)
    monkeypatch.chdir(tmp_path)
    assert source.matches("checkpoint") and source.matches("./checkpoint") and not source.matches("nothing")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert source.matches("~/checkpoint")
    assert source.resolve("~/checkpoint", ignore).path == checkpoint


def test_messages_say_what_is_missing(tmp_path: Path) -> None:
    source = create(tmp_path, False, None)
    with pytest.raises(ModelError, match="no such file"):
        source.resolve(str(tmp_path / "nothing"), ignore)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ModelError, match=r"neither config\.json .* nor a \.gguf \(it has notes\.txt\)"):
        source.resolve(str(tmp_path), ignore)
    with pytest.raises(ModelError, match=r"notes\.txt is not a \.gguf"):
        source.resolve(str(tmp_path / "notes.txt"), ignore)


def test_identity_follows_the_content(checkpoint: Path, tmp_path: Path) -> None:
    source = create(tmp_path, False, None)
    before = source.resolve(str(checkpoint), ignore).identity
    assert source.resolve(str(checkpoint), ignore).identity == before
    weights = checkpoint / "model.safetensors"
    facts = weights.stat()
    weights.write_bytes(b"w" * 2500 + b"v" + b"w" * 2499)  # same size, one byte in the middle
    os.utime(weights, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert source.resolve(str(checkpoint), ignore).identity != before
