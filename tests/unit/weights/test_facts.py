"""Facts of a checkpoint: config.json, generation_config.json or a GGUF header to `ModelConfig`, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import GenerationConfig, LlamaConfig

from gguf_samples import model_spec, write_llama
from infer.config.model import ModelConfig
from infer.errors import ModelError, UnsupportedModelError, WeightError
from infer.types import SamplingParams
from infer.weights.facts import read_model_config
from infer.weights.opening import open_checkpoint

SPECS = (model_spec(None, "OtherForCausalLM"), model_spec())
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def read(path: Path) -> ModelConfig:
    return read_model_config(path, "identity", SPECS)


def write(directory: Path, config: Any = CONFIG, generation: Any = None) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if generation is not None:
        text = generation if isinstance(generation, str) else json.dumps(generation)
        (directory / "generation_config.json").write_text(text)
    return directory


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        ({"factor": 4, "original_max_position_embeddings": 512}, 2048),
        ({"factor": 2.0, "original_max_position_embeddings": 512}, 2048),
        ({"factor": 4.0}, 2048),
        ({"factor": None, "original_max_position_embeddings": 1024}, 2048),
        ({"factor": float("nan"), "original_max_position_embeddings": 1024}, 2048),
        ({"factor": 1e300, "original_max_position_embeddings": 1024}, 2048),
        ({"factor": "4", "original_max_position_embeddings": 1024}, 2048),
        ({"factor": 4.0, "original_max_position_embeddings": 1024, "rope_type": "linear"}, 2048),
    ],
    ids=str,
)
def test_yarn_extends_the_context(tmp_path: Path, changes: dict[str, Any], expected: int) -> None:
    """Qwen's cards add the section and leave max_position_embeddings; other kinds of scaling are stated in it."""
    for key in ("rope_scaling", "rope_parameters"):
        scaled = CONFIG | {key: {"rope_type": "yarn"} | changes}
        assert read(write(tmp_path / key, scaled)).max_position == expected


def test_the_context_under_its_older_name(tmp_path: Path) -> None:
    older = {name: value for name, value in CONFIG.items() if name != "max_position_embeddings"}
    assert read(write(tmp_path / "older", older | {"n_positions": 512})).max_position == 512
    assert read(write(tmp_path / "both", CONFIG | {"n_positions": 512})).max_position == 2048
    with pytest.raises(ModelError, match="n_positions is 'long'; a positive integer is needed"):
        read(write(tmp_path / "wrong", older | {"n_positions": "long"}))
    with pytest.raises(ModelError, match="max_position_embeddings is missing"):
        read(write(tmp_path / "none", older))


def test_directory_with_both_files(tmp_path: Path) -> None:
    generation = {"eos_token_id": [2, 7, 2], "temperature": 0.6, "top_k": 20, "top_p": 0.9, "do_sample": True}
    found = read(write(tmp_path, CONFIG, generation))
    assert found == ModelConfig(
        path=tmp_path,
        format="safetensors",
        architecture="LlamaForCausalLM",
        identity="identity",
        vocab_size=1000,
        max_position=2048,
        dtype="bfloat16",
        bos_token_id=1,
        eos_token_ids=(2, 7),
        quantization=None,
        generation=found.generation,
        raw=CONFIG,
    )
    assert found.generation.values == {"temperature": 0.6, "top_k": 20, "top_p": 0.9}
    assert found.generation.eos_token_ids == (2, 7)


def test_what_transformers_writes_is_read(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=64, architectures=["LlamaForCausalLM"], dtype="float16", bos_token_id=None, eos_token_id=[3, 4]
    )
    config.save_pretrained(tmp_path)
    GenerationConfig(temperature=0.7, min_p=0.1, repetition_penalty=1.1, do_sample=True).save_pretrained(tmp_path)
    found = read(tmp_path)
    assert (found.vocab_size, found.max_position, found.dtype) == (64, 2048, "float16")
    assert found.bos_token_id is None and found.eos_token_ids == (3, 4)
    assert found.generation.values == {"temperature": 0.7, "min_p": 0.1, "repetition_penalty": 1.1}
    assert SamplingParams(**found.generation.values).min_p == 0.1


@pytest.mark.parametrize(
    ("generation", "values"),
    [
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.5}, {"temperature": 0.0}),
        ({"do_sample": False, "repetition_penalty": 1.2}, {"temperature": 0.0, "repetition_penalty": 1.2}),
        ({"temperature": 0.7}, {"temperature": 0.7}),
        ({"temperature": 1, "top_k": 50.0, "top_p": None}, {"temperature": 1.0, "top_k": 50}),
        ({"top_k": -1, "max_new_tokens": 5}, {"top_k": 0}),
        ({}, {}),
    ],
)
def test_sampling_defaults(tmp_path: Path, generation: dict[str, Any], values: dict[str, Any]) -> None:
    found = read(write(tmp_path, CONFIG, generation))
    assert found.generation.values == values
    assert found.eos_token_ids == (2,)  # silent there: config.json says


@pytest.mark.parametrize(
    "generation",
    [
        {"temperature": "hot"}, {"temperature": True}, {"temperature": -1}, {"top_p": 0}, {"top_p": 1.5},
        {"top_k": 2.5}, {"min_p": 2}, {"repetition_penalty": 0}, {"temperature": 10**400}, '{"top_p": NaN}',
        '{"top_k": Infinity}', {"do_sample": "no"}, {"eos_token_id": "2"}, {"eos_token_id": [2, None]},
        {"eos_token_id": True}, {"eos_token_id": -1}, {"eos_token_id": 1000}, "[1]", "{", "[" * 100_000,
    ],
)  # fmt: skip
def test_wrong_generation_config_names_the_file(tmp_path: Path, generation: Any) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        read(write(tmp_path, CONFIG, generation))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"vocab_size": 2**40}, f"vocab_size is {2**40}"),
        ({"max_position_embeddings": 2048.0}, "max_position_embeddings is 2048.0"),
        ({"torch_dtype": "float8"}, "dtype is 'float8'"),
        ({"torch_dtype": 16}, "dtype is 16"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM'"),
        ({"architectures": None}, "architectures is None"),
        ({"architectures": [3]}, "architectures"),
        ({"bos_token_id": "a"}, "bos_token_id is 'a'"),
        ({"eos_token_id": 1000}, "1000 is outside the vocabulary"),
        ({"quantization_config": "awq"}, "quantization_config is 'awq'"),
    ],
)
def test_wrong_facts_are_named(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        read(write(tmp_path, {**CONFIG, **change}))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", '{"a": ' * 100_000, "\u00ff\u00fe[1]"])
def test_broken_config(tmp_path: Path, text: str) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        read(write(tmp_path, text))


def test_huge_config_is_not_read(tmp_path: Path) -> None:
    with (write(tmp_path) / "config.json").open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(ModelError, match=f"{1 << 40} bytes"):
        read(tmp_path)


def test_unknown_architecture_names_it_and_the_known_ones(tmp_path: Path) -> None:
    strange = {**CONFIG, "architectures": ["StrangeForCausalLM"], "model_type": "strange"}
    with pytest.raises(
        UnsupportedModelError, match=r"'strange'.*StrangeForCausalLM.*LlamaForCausalLM, OtherForCausalLM"
    ):
        read(write(tmp_path, strange))


def test_remote_code_is_refused_only_where_we_do_not_know_the_architecture(tmp_path: Path) -> None:
    auto_map = {"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}
    assert read(write(tmp_path, {**CONFIG, **auto_map})).architecture == "LlamaForCausalLM"
    with pytest.raises(UnsupportedModelError, match=r"XForCausalLM.*auto_map"):
        read(write(tmp_path, {**CONFIG, **auto_map, "architectures": ["XForCausalLM"]}))


def test_first_known_architecture_wins(tmp_path: Path) -> None:
    assert (
        read(write(tmp_path, {**CONFIG, "architectures": ["X", "OtherForCausalLM"]})).architecture == "OtherForCausalLM"
    )


def test_text_config_and_quantization(tmp_path: Path) -> None:
    section = {"quant_method": "fp8"}
    nested = {
        "architectures": ["LlamaForCausalLM"],
        "eos_token_id": [5],
        "text_config": {**CONFIG, "quantization_config": section},
    }
    found = read(write(tmp_path, nested))
    assert (found.vocab_size, found.dtype, found.eos_token_ids, found.quantization) == (1000, "bfloat16", (5,), section)
    assert found.raw == nested


@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32"])
def test_silent_config_takes_the_dtype_of_the_weights(tmp_path: Path, stored: str) -> None:
    config = {k: v for k, v in CONFIG.items() if k != "torch_dtype"}
    assert read(write(tmp_path, config)).dtype == "float32"
    save_file({"a": torch.ones(64, dtype=getattr(torch, stored)), "b": torch.ones(2)}, tmp_path / "model.safetensors")
    assert read(tmp_path).dtype == stored
    assert read(write(tmp_path, {**config, "dtype": "torch.float16"})).dtype == "float16"


def test_pickle_only_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match=r"pytorch_model\.bin"):
        read(tmp_path)
    with pytest.raises(UnsupportedModelError, match="pickle"):
        read(tmp_path / "pytorch_model.bin")


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("")
    for path, named in ((tmp_path, "no model"), (tmp_path / "x.txt", "neither"), (tmp_path / "none", "does not exist")):
        with pytest.raises(ModelError, match=named):
            read(path)


def test_gguf_file_and_directory_with_one(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf", "Q8_0", general__sampling__temp=0.5, general__sampling__top_k=-1)
    (tmp_path / "mmproj-m.gguf").write_bytes(b"a vision tower beside it")
    found = read(path)
    assert read(tmp_path) == found
    assert (found.path, found.format, found.architecture) == (path, "gguf", "LlamaForCausalLM")
    assert (found.vocab_size, found.max_position, found.dtype) == (32, 128, "bfloat16")
    assert (found.bos_token_id, found.eos_token_ids, found.quantization) == (1, (2,), {"quant_method": "gguf"})
    assert found.generation.values == {"temperature": 0.5, "top_k": 0}
    write(tmp_path)  # a config.json beside a GGUF does not change what the weights are
    assert read(tmp_path) == found
    write_llama(tmp_path / "n.gguf")
    with pytest.raises(ModelError, match=r"2 GGUF files: m\.gguf, n\.gguf"):
        read(tmp_path)


def test_plain_gguf_has_no_quantization(tmp_path: Path) -> None:
    found = read(write_llama(tmp_path / "m.gguf", "F16"))
    assert (found.dtype, found.quantization) == ("float16", None)


def test_gguf_of_unknown_architecture(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf")
    with pytest.raises(UnsupportedModelError, match="'llama'; known are none"):
        read_model_config(path, "identity", SPECS[:1])


@pytest.mark.model
def test_facts_of_the_real_model(smollm2_gguf: Path) -> None:
    found = read(smollm2_gguf)
    assert (found.architecture, found.vocab_size, found.max_position) == ("LlamaForCausalLM", 49152, 8192)
    assert (found.bos_token_id, found.eos_token_ids, found.dtype) == (1, (2,), "bfloat16")
    assert (found.raw["num_hidden_layers"], found.raw["num_attention_heads"], found.raw["num_key_value_heads"]) == (
        30,
        9,
        3,
    )
    assert found.raw["rope_theta"] == 100000.0


def test_open_checkpoint_by_format(tmp_path: Path) -> None:
    gguf = open_checkpoint(read(write_llama(tmp_path / "m.gguf")), SPECS)
    assert gguf.tensors()["model.norm.weight"].shape == (64,)
    gguf.close()
    directory = write(tmp_path / "hf")
    with pytest.raises(ModelError, match=r"no \.safetensors file"):
        open_checkpoint(read(directory), SPECS)
    save_file({"a": torch.ones(2)}, directory / "model.safetensors")
    assert set(open_checkpoint(read(directory), SPECS).tensors()) == {"a"}
    (directory / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(WeightError, match="damaged"):
        open_checkpoint(read(directory), SPECS)
