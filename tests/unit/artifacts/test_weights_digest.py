"""A digest of the weights says which bytes they are, and nothing when that is not known."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

import pytest

from infer.artifacts.weights_digest import weights_digest
from infer.config.model import GenerationDefaults, ModelConfig
from infer.plugins.model_files import fingerprint


def model(path: Path, identity: str | None = None) -> ModelConfig:
    return ModelConfig(
        path=path,
        format="safetensors",
        architecture="LlamaForCausalLM",
        identity=fingerprint(path) if identity is None else identity,
        vocab_size=8,
        max_position=8,
        dtype="float32",
        bos_token_id=None,
        eos_token_ids=(),
        quantization=None,
        generation=GenerationDefaults(),
        raw={},
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "b.safetensors").write_bytes(os.urandom(5_000_000))
    return tmp_path


@pytest.mark.row("X-ARTIFACT-V2", "provenance: a digest of the weights")
def test_of_one_file_and_of_several_as_sha256sum_prints_it(folder: Path) -> None:
    one = folder / "b.safetensors"
    alone = f"sha256:{hashlib.sha256(one.read_bytes()).hexdigest()}"
    assert weights_digest(model(folder)) == weights_digest(model(one)) == alone
    assert weights_digest(model(folder, f"{fingerprint(folder)}+q8_0")) == alone, "quantised while it was loaded"
    (folder / "a.safetensors").write_bytes(b"abc")
    printed = subprocess.run("sha256sum *.safetensors", shell=True, cwd=folder, capture_output=True, check=True).stdout
    assert weights_digest(model(folder)) == f"sha256:{hashlib.sha256(printed).hexdigest()}"


def test_it_is_of_the_content_and_not_of_the_place(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    (other / "b.safetensors").write_bytes((folder / "b.safetensors").read_bytes())
    os.utime(other / "b.safetensors", (1, 1))
    assert weights_digest(model(other)) == weights_digest(model(folder))


def test_large_weights_are_sampled_and_say_so(folder: Path) -> None:
    path = folder / "b.safetensors"
    with path.open("wb") as file:
        file.truncate(40 * 2**20)
    found = weights_digest(model(folder), whole_bytes=2**20)
    assert found.startswith("sha256-sampled:") and found == weights_digest(model(folder), whole_bytes=2**21)
    for position in (0, 2**24, 2**25 + 2**16 - 1, 40 * 2**20 - 1):
        with path.open("r+b") as file:
            file.seek(position)
            file.write(b"x")
        changed = weights_digest(model(folder), whole_bytes=2**20)
        assert changed != found
        found = changed
    with path.open("r+b") as file:
        file.truncate(40 * 2**20 + 1)
    assert weights_digest(model(folder), whole_bytes=2**20) != found


def test_what_is_not_known_is_empty(folder: Path) -> None:
    loaded = model(folder)
    (folder / "b.safetensors").write_bytes(b"others by now")
    assert weights_digest(loaded) == "", "the file is not the one that was loaded"
    assert weights_digest(model(folder, "hf:org/name@1")), "files of a cache are those of their revision"
    assert weights_digest(model(folder, "x"), lambda: True) == ""
    (folder / "b.safetensors").unlink()
    assert weights_digest(model(folder, "hf:org/name@1")) == ""
    assert weights_digest(model(folder / "absent", "x")) == ""
