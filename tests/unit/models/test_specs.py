"""The models' specs: planning without memory, facts refused by name, and the GGUF names against the gguf package."""

from __future__ import annotations

import re
from typing import Any

import gguf
import pytest
import torch

from infer.backends.reference.platform import OPS
from infer.config.model import KVGroup
from infer.errors import ModelError, UnsupportedModelError
from infer.layers.parameter import named_parameters
from infer.models import gemma3, llama, qwen2, qwen3
from infer.plugins.model import ModelSpec
from infer.quantization.unquantized import UnquantizedMethod
from infer.testing.tiny_models import build_model, model_config
from infer.weights.loader import parameter_bytes

from .conftest import SPECS

VIEWS = {
    "LlamaForCausalLM": llama.config_view,
    "MistralForCausalLM": llama.config_view,
    "Qwen2ForCausalLM": qwen2.config_view,
    "Qwen3ForCausalLM": qwen3.config_view,
    "Gemma3ForCausalLM": gemma3.config_view,
}


def plan(architecture: str, **changes: Any) -> Any:
    spec = SPECS[architecture]
    return build_model(spec, model_config(spec.example | changes), ops=OPS, quant=UnquantizedMethod(), device="meta")


@pytest.mark.parametrize("architecture", SPECS)
def test_planning_takes_no_memory(architecture: str) -> None:
    huge = plan(architecture, hidden_size=8192, intermediate_size=65536, vocab_size=200_000, num_hidden_layers=80)
    parameters = named_parameters(huge)
    assert all(parameter.data.is_meta for parameter in parameters.values())
    assert parameter_bytes(huge) == sum(4 * parameter.data.numel() for parameter in parameters.values())
    assert parameter_bytes(huge) > 400 * 2**30
    assert len(huge.kv_layout().layers) == 80


def test_tied_weights_count_once() -> None:
    tied, untied = (plan("LlamaForCausalLM", tie_word_embeddings=flag) for flag in (True, False))
    assert parameter_bytes(untied) - parameter_bytes(tied) == 96 * 32 * 4


def test_kv_groups() -> None:
    def groups(architecture: str, **changes: Any) -> tuple[KVGroup, ...]:
        layout: tuple[KVGroup, ...] = plan(architecture, **changes).kv_layout().groups
        return layout

    six = tuple(range(6))
    assert groups("LlamaForCausalLM") == (KVGroup(name="full", layer_ids=(0, 1)),)
    assert groups("MistralForCausalLM") == (KVGroup(name="sliding_16", layer_ids=(0, 1), window=16),)
    assert groups("Gemma3ForCausalLM", num_hidden_layers=6, sliding_window_pattern=None) == (
        KVGroup(name="full", layer_ids=(5,)),
        KVGroup(name="sliding_16", layer_ids=six[:5], window=16),
    )
    assert groups("Qwen2ForCausalLM", num_hidden_layers=6, max_window_layers=4) == (
        KVGroup(name="full", layer_ids=(0, 1, 2, 3)),
        KVGroup(name="sliding_16", layer_ids=(4, 5), window=16),
    )
    assert groups("Qwen3ForCausalLM", num_hidden_layers=6) == (KVGroup(name="full", layer_ids=six),)


def test_a_llama_with_a_stray_window_ignores_it() -> None:
    assert llama.config_view(model_config(llama.EXAMPLE | {"sliding_window": 8})).attention.window is None


def test_mistral_means_4096_when_it_is_silent() -> None:
    silent = {k: v for k, v in SPECS["MistralForCausalLM"].example.items() if k != "sliding_window"}
    assert llama.config_view(model_config(silent)).attention.window == 4096
    assert llama.config_view(model_config(silent | {"sliding_window": None})).attention.window is None


WRONG: list[tuple[str, dict[str, Any], type[ModelError], str]] = [
    (name, changes, error, message)
    for name in SPECS
    for changes, error, message in [
        ({"hidden_size": None}, ModelError, "hidden_size"),
        ({"hidden_size": "32"}, ModelError, "hidden_size='32'"),
        ({"num_hidden_layers": 0}, ModelError, "num_hidden_layers=0"),
        ({"intermediate_size": -4}, ModelError, "intermediate_size=-4"),
        ({"num_attention_heads": True}, ModelError, "num_attention_heads=True"),
        ({"num_key_value_heads": 3}, ModelError, "num_key_value_heads=3"),
        ({"head_dim": 7}, ModelError, "head_dim=7"),
        ({"rms_norm_eps": 0}, ModelError, "rms_norm_eps=0"),
        ({"rms_norm_eps": float("nan")}, ModelError, "rms_norm_eps=nan"),
        ({"tie_word_embeddings": "yes"}, ModelError, "tie_word_embeddings='yes'"),
        ({"rope_theta": -1.0}, ModelError, "rope_theta=-1.0"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, UnsupportedModelError, "'longrope'"),
        ({"rope_scaling": {"rope_type": "dynamic", "alpha": 1000.0}}, UnsupportedModelError, "'dynamic'"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, ModelError, "rope_scaling.factor=None"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0}}, ModelError, "rope_scaling.factor=0"),
        ({"rope_scaling": {"rope_type": "yarn", "beta_fast": -1}}, ModelError, "rope_scaling.beta_fast=-1"),
        ({"rope_scaling": {"rope_type": "yarn", "truncate": 1}}, ModelError, "rope_scaling.truncate=1"),
        ({"rope_scaling": {"rope_type": "yarn", "mscale_all_dim": "1"}}, ModelError, "rope_scaling.mscale_all_dim='1'"),
        ({"rope_scaling": {"rope_type": "yarn", "attention_factor": 0}}, ModelError, "rope_scaling.attention_factor=0"),
        ({"rope_scaling": {"rope_type": "yarn", "rope_theta": 1}}, ModelError, "rope_theta=1"),
        (
            {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": "long"}},
            ModelError,
            "original_max_position_embeddings='long'",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, ModelError, "rope_scaling.factor=None"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, ModelError, "rope_scaling.low_freq_factor=None"),
        ({"rope_scaling": [8]}, ModelError, "rope_scaling=[8]"),
    ]
]
WRONG += [
    ("LlamaForCausalLM", {"hidden_act": "relu"}, UnsupportedModelError, "hidden_act='relu'"),
    ("LlamaForCausalLM", {"hidden_size": 33, "head_dim": None}, ModelError, "hidden_size=33"),
    ("MistralForCausalLM", {"sliding_window": 0}, ModelError, "sliding_window=0"),
    ("Qwen2ForCausalLM", {"max_window_layers": -1}, ModelError, "max_window_layers=-1"),
    ("Qwen2ForCausalLM", {"layer_types": ["full_attention"]}, ModelError, "layer_types"),
    ("Qwen3ForCausalLM", {"layer_types": ["full_attention", "sliding_attention"]}, ModelError, "sliding_window=None"),
    ("Qwen3ForCausalLM", {"layer_types": ["full_attention", "chunked"]}, UnsupportedModelError, "'chunked'"),
    ("Gemma3ForCausalLM", {"hidden_activation": "gelu"}, UnsupportedModelError, "hidden_activation='gelu'"),
    ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, UnsupportedModelError, "use_bidirectional_attention"),
    ("Gemma3ForCausalLM", {"query_pre_attn_scalar": 0}, ModelError, "query_pre_attn_scalar=0"),
    ("Gemma3ForCausalLM", {"sliding_window_pattern": 0}, ModelError, "sliding_window_pattern=0"),
]


@pytest.mark.parametrize(("architecture", "changes", "error", "message"), WRONG, ids=lambda v: str(v)[:40])
def test_wrong_facts_name_key_and_value(
    architecture: str, changes: dict[str, Any], error: type[ModelError], message: str
) -> None:
    config = model_config(SPECS[architecture].example | changes)
    with pytest.raises(error, match=re.escape(message)) as caught:
        VIEWS[architecture](config)
    assert type(caught.value) is error
    assert architecture in str(caught.value)


def test_gguf_files_that_state_no_attention_scale() -> None:
    def scale(**changes: Any) -> float:
        raw = {k: v for k, v in gemma3.EXAMPLE.items() if k != "query_pre_attn_scalar"} | changes
        config = model_config(raw)
        config = type(config)(**{name: getattr(config, name) for name in config.__struct_fields__} | {"format": "gguf"})
        return gemma3.config_view(config).attention[0].scale

    assert scale(head_dim=256) == pytest.approx(256**-0.5)
    published_27b = {"num_hidden_layers": 62, "hidden_size": 5376, "num_attention_heads": 32, "head_dim": 128}
    assert scale(**published_27b) == pytest.approx(168**-0.5)


GGUF_SPECS = [spec for spec in SPECS.values() if spec.gguf is not None]
ARCHS = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
}


@pytest.mark.parametrize("spec", GGUF_SPECS, ids=lambda spec: spec.name)
def test_gguf_tensor_names(spec: ModelSpec) -> None:
    """Every tensor of an untied model has the name that llama.cpp's own table gives it."""
    assert spec.gguf is not None
    model = plan(spec.architectures[0], tie_word_embeddings=False)
    table = gguf.get_tensor_name_map(ARCHS[spec.gguf.arch], 2)
    ours = {
        hf.replace("{i}", str(i)): name.replace("{i}", str(i)) for name, hf in spec.gguf.tensors.items() for i in (0, 1)
    }
    names = model.weight_table().targets
    assert set(names) == set(ours)
    for hf, name in ours.items():
        stem, suffix = hf.rsplit(".", 1)
        assert f"{table.get_name(stem)}.{suffix}" == name


@pytest.mark.parametrize("spec", GGUF_SPECS, ids=lambda spec: spec.name)
def test_gguf_config_keys(spec: ModelSpec) -> None:
    """Metadata keys exist in the gguf package under the same spelling."""
    assert spec.gguf is not None
    keys = gguf.Keys
    known = {
        value.removeprefix("{arch}.")
        for section in (keys.LLM, keys.Attention, keys.Rope)
        for value in vars(section).values()
        if isinstance(value, str)
    }
    assert set(spec.gguf.config_keys.values()) <= known
    assert spec.gguf.architecture in spec.architectures


@pytest.mark.parametrize("architecture", SPECS)
def test_bf16_models_keep_what_needs_fp32(architecture: str) -> None:
    spec = SPECS[architecture]
    model = build_model(
        spec,
        model_config(spec.example),
        ops=OPS,
        quant=UnquantizedMethod(),
        dtype=torch.bfloat16,
        device="meta",
    )
    kept = {path for path, parameter in named_parameters(model).items() if parameter.data.dtype == torch.float32}
    norms = {path for path in named_parameters(model) if "norm" in path}
    assert kept == (norms if architecture == "Gemma3ForCausalLM" else set())
