"""The example of a quantization method: it stores what torch's quantizer does, and models say with it what transformers says."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf import quants as quants_of_gguf
from safetensors.torch import load_file, save_file

from infer import SamplingParams, UnsupportedModelError, WeightError
from infer.config.engine import PluginsSection
from infer.plugins import build_registry
from infer.testing.tiny_models import random_transformers_model
from infer.weights.grouped_blocks import block_type, blocks_of, numbers_of
from integration.engine_support import LLAMA as MODEL
from integration.engine_support import prompt, serve, write_checkpoint
from plugin_package.installing import EXAMPLES, install


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("int8") / "llama", MODEL)


def per_channel(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """int8 [N, I] by torch's quantizer, which the plugin does not use."""
    steps = torch.where(scales == 0, 1.0, scales.float())
    zeros = torch.zeros(len(scales), dtype=torch.int32)
    rounded = torch.fake_quantize_per_channel_affine(weight.float(), steps, zeros, 0, -127, 127)
    return (rounded.double() / steps.double()[:, None]).round().to(torch.int8)


@pytest.fixture
def int8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of infer-int8, installed."""
    install(EXAMPLES / "infer-int8", tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return importlib.import_module("infer_int8")


@pytest.mark.parametrize("columns", [64, 96, 40], ids=["blocks", "three blocks", "no blocks"])
def test_int8_multiplies_as_float64_does(int8: Any, columns: int) -> None:
    """Through the reader and the platform's kernels; what torch's quantizer stores is what the plugin's own does."""
    weight = torch.randn(48, columns, generator=torch.Generator().manual_seed(3)) * torch.logspace(-4, 2, 48)[:, None]
    weight[7] = 0
    quants, scales = int8.quantize(weight)
    assert scales.dtype == torch.float16 and scales[7] == 0 and not quants[7].any()
    exact = quants.double() * scales.double()[:, None]
    assert ((exact - weight).abs() <= scales.double()[:, None] * (0.5 + 1e-9)).all(), (
        "half a step, whatever the row's size"
    )
    ulp = 2.0 ** (scales.double().clamp_min(2.0**-14).log2().floor() - 10)
    assert ((scales.double() - weight.double().abs().amax(1) / 127).abs() <= ulp).all()
    theirs = per_channel(weight, scales)
    assert (quants.int() - theirs.int()).abs().max() <= 1, (
        "torch multiplies with the inverse, where ties fall otherwise"
    )
    assert (quants != theirs).double().mean() < 0.01
    form = int8.Int8Channel({"version": 1})
    stored = {
        "a.weight": SimpleNamespace(shape=(48, columns), stored_dtype="I8"),
        "a.weight_scale": SimpleNamespace(shape=(48,), stored_dtype="F16"),
    }
    found = form.weights(stored)["a.weight"]
    rows = form.rows(found, {"quants": quants, "scales": scales}, 0, 48)
    assert torch.equal(numbers_of(rows, found).double(), exact), "8 bits times 11 fit a float32"
    kind = block_type(found)
    assert kind == ("Q8_0" if columns % 32 == 0 else None)
    if kind is None:
        return
    packed = blocks_of(rows, found, "a.weight")
    read = quants_of_gguf.dequantize(packed.numpy(), GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(read.astype(np.float64), exact.numpy())
    x = torch.randn(5, columns, generator=torch.Generator().manual_seed(4))
    blocks = build_registry(PluginsSection(allow=())).create("platform", "cpu", threads=1).ops.blocks
    made = blocks.linear(x, blocks.pack(packed, kind), kind, None, torch.float32)
    # The kernel may round an activation by half a step of 8 bits; 32 neighbours share the step.
    steps = x.double().abs().view(5, -1, 32).amax(-1, keepdim=True).expand(-1, -1, 32).reshape(5, columns) / 127
    allowed = 0.51 * steps @ exact.abs().T + 1e-5 * (x.double().abs() @ exact.abs().T)
    assert ((made.double() - x.double() @ exact.T).abs() <= allowed).all()


def write_int8(source: Path, target: Path) -> Path:
    """As `infer_int8.convert`, with torch's quantizer."""
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    for name, weight in list(tensors.items()):
        if name.endswith("_proj.weight"):
            scales = (weight.double().abs().amax(1) / 127).half()
            tensors[name], tensors[f"{name}_scale"] = per_channel(weight, scales), scales
    save_file(tensors, target / "model.safetensors")
    section = {"quant_method": "int8-channel", "version": 1}
    (target / "config.json").write_text(json.dumps(MODEL | {"quantization_config": section}))
    return target


@pytest.mark.parametrize("writer", ["torch", "infer_int8"])
def test_an_int8_checkpoint_says_what_transformers_says(
    int8: Any, checkpoint: Path, tmp_path: Path, writer: str
) -> None:
    """Of the numbers that were stored: to the rounding of float32 on the reference, and with the kernels, whose bytes stay
    bytes, to the rounding of activations."""
    path = tmp_path / "int8"
    if writer == "torch":
        write_int8(checkpoint, path)
    else:
        assert int8.convert(checkpoint, path) == 7 * MODEL["num_hidden_layers"]
    model = random_transformers_model(MODEL, 0).eval().double()
    stored = load_file(path / "model.safetensors")
    for name in [name for name, tensor in stored.items() if tensor.dtype == torch.int8]:
        rounded = stored[name].double() * stored[f"{name}_scale"].double()[:, None]
        original = model.get_parameter(name).data
        assert 0 < (rounded - original).abs().max() < original.abs().max() / 200
        model.get_parameter(name).data = rounded
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    ids = prompt(40)
    with torch.inference_mode():
        right = (
            model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        )
    sizes = []
    for platform, allowed in (("reference", 1e-4), ("cpu", 0.25)):
        with serve(path, model={"expand_quantized": False}, platform={"name": platform}) as engine:
            found = engine.generate(ids, params).prompt_logprobs
            sizes.append(engine.engine.resolved.memory.weights)
            notices = [notice for notice in engine.engine.resolved.notices if "weights are expanded" in notice]
        assert len(notices) == (platform == "reference")
        made = torch.tensor([entry.logprob for entry in found if entry is not None], dtype=torch.float64)
        assert (made - right).abs().max() < allowed, platform
    assert sizes[1] < sizes[0]
    with torch.inference_mode():
        other = random_transformers_model(MODEL, 1).double()(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    assert (other.gather(1, torch.tensor(ids[1:])[:, None])[:, 0] - right).abs().max() > 1, "the numbers say something"


def test_int8_refuses_by_name(int8: Any, checkpoint: Path, tmp_path: Path) -> None:
    path = write_int8(checkpoint, tmp_path / "int8")
    config = json.loads((path / "config.json").read_text())
    with pytest.raises(UnsupportedModelError, match="is quantised already; convert the plain checkpoint"):
        int8.convert(path, tmp_path / "again")
    assert not (tmp_path / "again").exists()
    with pytest.raises(WeightError, match="not finite, or larger than"):
        int8.quantize(torch.tensor([[1.0, float("nan")]]))
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "int8-channel"}}))
    with (
        pytest.raises(UnsupportedModelError, match="int8-channel with version=None is not supported; 1 is"),
        serve(path),
    ):
        pass
    (path / "config.json").write_text(json.dumps(config))
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight_scale"
    broken = tensors | {name: torch.full_like(tensors[name], float("inf"))}
    save_file(broken, path / "model.safetensors")
    with pytest.raises(WeightError, match=rf"{name}' holds numbers that are not finite"), serve(path):
        pass
