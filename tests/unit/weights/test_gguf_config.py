"""GGUF metadata translated to config.json: the real model's facts, rope scaling, heads, vocabulary, windows."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gguf_samples import LLAMA_METADATA, LLAMA_NAMES, llama_tensors, llama_weights, write_gguf, write_llama
from infer.errors import ModelError, UnsupportedModelError, WeightError
from infer.weights.gguf import GGUFFile
from infer.weights.gguf_config import gguf_config


def config_of(path: Path) -> dict[str, Any]:
    with GGUFFile.open(path) as file:
        return gguf_config(file, LLAMA_NAMES)


def with_tensor(path: Path, name: str, value: np.ndarray, **metadata: Any) -> Path:
    tensors = {**llama_tensors(llama_weights()), name: (value, "F32")}
    return write_gguf(path, tensors, {**LLAMA_METADATA, **metadata})


@pytest.mark.model
def test_facts_of_the_real_model(smollm2_gguf: Path) -> None:
    assert config_of(smollm2_gguf) == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "unk_token_id": 0,
    }


def test_output_weight_means_untied(tmp_path: Path) -> None:
    assert config_of(write_llama(tmp_path / "a.gguf"))["tie_word_embeddings"] is True
    untied = with_tensor(tmp_path / "b.gguf", "output.weight", np.ones((32, 64), np.float32))
    assert config_of(untied)["tie_word_embeddings"] is False


@pytest.mark.parametrize(
    ("type_name", "dtype"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "bfloat16")]
)
def test_dtype_is_that_of_the_matrices(tmp_path: Path, type_name: str, dtype: str) -> None:
    assert config_of(write_llama(tmp_path / "m.gguf", type_name))["torch_dtype"] == dtype


def test_missing_kv_heads_are_the_query_heads_and_per_layer_arrays_collapse(tmp_path: Path) -> None:
    metadata = {**LLAMA_METADATA, "llama.attention.head_count": [4, 4]}
    del metadata["llama.attention.head_count_kv"]
    config = config_of(write_gguf(tmp_path / "m.gguf", llama_tensors(llama_weights()), metadata))
    assert config["num_attention_heads"] == config["num_key_value_heads"] == 4 and config["head_dim"] == 16


def test_head_dim_window_and_partial_rotary(tmp_path: Path) -> None:
    path = write_llama(
        tmp_path / "m.gguf", llama__attention__key_length=32, llama__attention__value_length=32,
        llama__attention__sliding_window=4096,
    )  # fmt: skip
    config = config_of(path)
    assert (config["head_dim"], config["sliding_window"], config["partial_rotary_factor"]) == (32, 4096, 0.5)


def test_file_wins_over_fixed(tmp_path: Path) -> None:
    names = dataclasses.replace(LLAMA_NAMES, fixed={"rope_theta": 1.0, "sliding_window_pattern": 6})
    with GGUFFile.open(write_llama(tmp_path / "m.gguf")) as file:
        config = gguf_config(file, names)
    assert (config["rope_theta"], config["sliding_window_pattern"]) == (10000.0, 6)


def test_several_ends_of_text(tmp_path: Path) -> None:
    path = write_llama(
        tmp_path / "m.gguf", tokenizer__ggml__eot_token_id=5, tokenizer__ggml__eom_token_id=2
    )  # eom repeats eos
    assert config_of(path)["eos_token_id"] == [2, 5]


def test_linear_and_yarn_scaling(tmp_path: Path) -> None:
    linear = write_llama(tmp_path / "a.gguf", llama__rope__scaling__type="linear", llama__rope__scaling__factor=8.0)
    assert config_of(linear)["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    yarn = write_llama(
        tmp_path / "b.gguf", llama__rope__scaling__type="yarn", llama__rope__scaling__factor=4.0,
        llama__rope__scaling__original_context_length=32768,
    )  # fmt: skip
    assert config_of(yarn)["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    }
    betas = write_llama(
        tmp_path / "e.gguf", llama__rope__scaling__type="yarn", llama__rope__scaling__factor=4.0,
        llama__rope__scaling__yarn_beta_fast=16.0, llama__rope__scaling__yarn_beta_slow=2.0,
        llama__rope__scaling__attn_factor=1.0, llama__rope__scaling__yarn_log_multiplier=0.0,
    )  # fmt: skip
    assert config_of(betas)["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    }
    for key in ("attn_factor", "yarn_log_multiplier"):
        unclear = {f"llama__rope__scaling__{key}": 0.5}
        path = write_llama(
            tmp_path / f"{key}.gguf", llama__rope__scaling__type="yarn", llama__rope__scaling__factor=4.0, **unclear
        )
        with pytest.raises(UnsupportedModelError, match=rf"llama\.rope\.scaling\.{key}=0\.5"):
            config_of(path)
    none = write_llama(tmp_path / "c.gguf", llama__rope__scaling__type="none")
    assert "rope_scaling" not in config_of(none)
    old = write_llama(tmp_path / "d.gguf", llama__rope__scale_linear=2.0)
    assert config_of(old)["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("head_dim", "theta", "factor", "original"),
    [(128, 500000.0, 8.0, 8192), (64, 500000.0, 32.0, 8192), (16, 10000.0, 8.0, 256), (16, 500000.0, 8.0, 8192)],
)
def test_llama3_scaling_is_recovered_from_its_factors(
    tmp_path: Path, head_dim: int, theta: float, factor: float, original: int
) -> None:
    """Oracle: transformers' inverse frequencies. The recovered parameters must give the same ones."""
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }

    def frequencies(parameters: dict[str, Any]) -> torch.Tensor:
        config = LlamaConfig(
            head_dim=head_dim, max_position_embeddings=131072, rope_parameters={**parameters, "rope_theta": theta}
        )
        result: torch.Tensor = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]
        return result

    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    factors = (plain / frequencies(scaling).double()).float().numpy()
    path = with_tensor(
        tmp_path / "m.gguf",
        "rope_freqs.weight",
        factors,
        **{
            "llama.rope.freq_base": theta,
            "llama.attention.key_length": head_dim,
            "llama.rope.dimension_count": head_dim,
        },
    )
    found = config_of(path)["rope_scaling"]
    assert found["factor"] == pytest.approx(factor, rel=1e-5) and found["rope_type"] == "llama3"
    assert torch.allclose(frequencies(found), frequencies(scaling), rtol=1e-5)


def test_rope_factors_of_one_scale_nothing_and_unknown_ones_are_refused(tmp_path: Path) -> None:
    assert "rope_scaling" not in config_of(
        with_tensor(tmp_path / "a.gguf", "rope_freqs.weight", np.ones(8, np.float32))
    )
    for index, bad in enumerate((np.arange(1, 9), np.full(8, np.nan), np.zeros(8), np.full(8, np.inf), -np.ones(8))):
        path = with_tensor(tmp_path / f"b{index}.gguf", "rope_freqs.weight", bad.astype(np.float32))
        with pytest.raises(UnsupportedModelError, match="rope_freqs"):
            config_of(path)
    path = with_tensor(tmp_path / "c.gguf", "rope_freqs.weight", np.full(4, 2, np.float32))
    with pytest.raises(ModelError, match="rope_freqs"):
        config_of(path)


@pytest.mark.parametrize(
    ("metadata", "error", "named"),
    [
        ({"llama__rope__freq_base": float("nan")}, ModelError, "freq_base"),
        ({"tokenizer__ggml__eos_token_id": "two"}, ModelError, "eos_token_id.*'two'"),
        ({"llama__rope__scaling__type": "longrope"}, UnsupportedModelError, "longrope"),
        ({"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 0.0}, ModelError, "factor is 0.0"),
        ({"llama__attention__key_length": 8, "llama__attention__value_length": 16}, UnsupportedModelError, "8 and"),
        ({"tokenizer__ggml__tokens": ["t"] * 33}, WeightError, "33 tokens"),
    ],
)
def test_wrong_facts_are_named(tmp_path: Path, metadata: dict[str, Any], error: type[Exception], named: str) -> None:
    path = write_llama(tmp_path / "m.gguf", **metadata)
    with pytest.raises(error, match=named):
        config_of(path)
