"""tokenizer.json files that make the Rust library panic: a panic is no `Exception`, and used to end whoever met it.
Runs the real library on small hand-written files."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from infer.errors import ModelError
from infer.tokenizers.hf import load

CHARSMAP = base64.b64encode(b"\x04\0\0\0\xff\xff\xff\xff").decode()
EMPTY = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}


def written(directory: Path, **parts: Any) -> Path:
    empty = {"truncation": None, "padding": None, "normalizer": None, "pre_tokenizer": None, "post_processor": None}
    file = {"version": "1.0", **empty, "decoder": None, "added_tokens": [], "model": EMPTY, **parts}
    (directory / "tokenizer.json").write_text(json.dumps(file))
    return directory


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": CHARSMAP}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"}},
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        {"model": {"type": "WordLevel", "unk_token": "[UNK]", "vocab": {"a": 0}}},
    ],
    ids=["charsmap", "backtracking", "chunks of nothing", "no unknown token"],
)
def test_a_text_that_the_library_cannot_take_is_a_typed_error(tmp_path: Path, parts: dict[str, Any]) -> None:
    tokenizer = load(written(tmp_path, **parts))
    with pytest.raises(ModelError, match="cannot encode this text"):
        tokenizer.encode("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa c")


def test_ids_that_the_library_cannot_take_are_a_typed_error(tmp_path: Path) -> None:
    tokenizer = load(written(tmp_path, decoder={"type": "Strip", "content": "a", "start": 99, "stop": 99}))
    with pytest.raises(ModelError, match="cannot decode"):
        tokenizer.decode([0])
    with pytest.raises(ModelError, match="cannot decode"):
        tokenizer.decode_stream([]).step(0)


def test_a_file_that_the_library_panics_on_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read as a tokenizer"):
        load(written(tmp_path, normalizer={"type": "Precompiled", "precompiled_charsmap": ""}))
