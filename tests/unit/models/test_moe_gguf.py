"""Mixture-of-experts GGUF files, written by gguf-py: stacked experts, quantised too, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from infer.backends.cpu.build import build_library
from infer.backends.cpu.library import Library
from infer.backends.cpu.ops import make_kernels, make_ops
from infer.backends.reference.platform import OPS
from infer.errors import WeightError
from infer.layers.parameter import Layer, named_parameters
from infer.models import olmoe, qwen3_moe
from infer.plugins.model import GGUFNames, ModelSpec
from infer.quantization.unquantized import UnquantizedMethod
from infer.testing.tiny_models import PagedDriver, build_model, model_config, random_transformers_model
from infer.weights.blocks import keep_stored_blocks
from infer.weights.gguf_checkpoint import GGUFCheckpoint
from infer.weights.loader import load_weights

SPECS = [*qwen3_moe.infer_models(), *olmoe.infer_models()]
ARCHS = {"qwen3moe": gguf.MODEL_ARCH.QWEN3MOE, "olmoe": gguf.MODEL_ARCH.OLMOE}
# 32 wide everywhere: a row is a whole block.
CHANGES = {"intermediate_size": 32, "moe_intermediate_size": 32, "num_key_value_heads": 4}
Q8 = gguf.GGMLQuantizationType.Q8_0


def names_of(spec: ModelSpec) -> GGUFNames:
    assert spec.gguf is not None
    return spec.gguf


def write(path: Path, names: GGUFNames, config: dict[str, Any], tensors: dict[str, Any]) -> Path:
    """As the converter does: names from gguf-py's table, experts stacked, expert matrices in Q8_0."""
    writer = gguf.GGUFWriter(path, names.arch)
    for key, value in config.items():
        suffix = names.config_keys.get(key)
        if suffix is not None and key != "vocab_size":
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"{names.arch}.{suffix}", value)
    writer.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(config["vocab_size"])])
    table = gguf.get_tensor_name_map(ARCHS[names.arch], config["num_hidden_layers"])
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in tensors.items():
        stem, suffix = name.rsplit(".", 1)
        block, found, rest = stem.partition(".experts.")
        if found:
            expert, _, part = rest.partition(".")
            stacks.setdefault(f"{table.get_name(f'{block}.experts.{part}')}.{suffix}", {})[int(expert)] = tensor
        else:
            writer.add_tensor(f"{table.get_name(stem)}.{suffix}", tensor)
    for name, parts in stacks.items():
        stacked = np.stack([parts[e] for e in range(len(parts))])
        writer.add_tensor(name, gguf.quantize(stacked, Q8), raw_dtype=Q8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_stacked_experts_are_read_one_by_one(spec: ModelSpec, native: bool, tmp_path: Path, kernel_cache: Path) -> None:
    """They are expanded by the reference; the native kernels take them in the blocks of the file."""
    config = spec.example | CHANGES
    oracle = random_transformers_model(config)
    with torch.no_grad():  # what Q8_0 can hold, so that both sides have the same weights
        for name, parameter in oracle.named_parameters():
            if ".experts." in name:
                parameter.copy_(torch.from_numpy(gguf.dequantize(gguf.quantize(parameter.numpy(), Q8), Q8)))
    oracle.save_pretrained(tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    checkpoint = GGUFCheckpoint(write(tmp_path / "m.gguf", names_of(spec), config, arrays), names_of(spec))
    assert set(checkpoint.tensors()) == set(tensors)
    read = model_config(checkpoint.config())
    library = Library(build_library(kernel_cache), 2) if native else None
    ops = OPS if library is None else make_ops(*make_kernels(library))
    model = build_model(spec, read, ops=ops, quant=UnquantizedMethod())
    if ops.blocks is not None:
        kinds = {name: info.stored_dtype for name, info in checkpoint.tensors().items() if ".experts." in name}
        keep_stored_blocks(model, kinds, ops.blocks)
    kept = {path.rpartition(".")[2]: p.blocks for path, p in named_parameters(cast(Layer, model)).items() if p.blocks}
    assert kept == ({"gate_up": "Q8_0", "down": "Q8_0"} if native else {})
    load_weights(model, checkpoint)
    checkpoint.close()
    ids = list(range(3, 40))
    with torch.no_grad():
        expected = oracle(torch.tensor([ids])).logits[0]
        got = PagedDriver(model).step([("a", ids)])[0]
    if library is not None:
        library.close()
    if not native:
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
        return
    # Activations are int8 in the experts, so a router behind them may choose another one where two are nearly tied.
    worst = (got - expected).abs().amax(-1)
    assert worst.median() < 0.05 and (worst < 0.05).double().mean() > 0.85


def test_an_expert_tensor_that_is_no_stack_is_refused(tmp_path: Path) -> None:
    names = names_of(SPECS[0])
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", names.arch)
    writer.add_array("tokenizer.ggml.tokens", ["a"])
    writer.add_tensor("blk.0.ffn_up_exps.weight", np.zeros((4, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(WeightError, match=r"blk\.0\.ffn_up_exps\.weight.*\(4, 32\).*no stack of experts"):
        GGUFCheckpoint(tmp_path / "m.gguf", names)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_metadata_keys_are_those_of_the_gguf_package(spec: ModelSpec) -> None:
    keys = gguf.Keys
    sections = (keys.LLM, keys.Attention, keys.Rope)
    known = {value for section in sections for value in vars(section).values() if isinstance(value, str)}
    assert {f"{{arch}}.{suffix}" for suffix in names_of(spec).config_keys.values()} <= known
