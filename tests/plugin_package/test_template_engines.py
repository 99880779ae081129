"""What a kit cannot see of a template: an engine loads a checkpoint with it, and says what transformers says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from infer.cli.plugin_new import package
from infer.models.llama import EXAMPLE
from infer.plugins.registry import Kind
from infer.testing.tiny_models import random_transformers_model
from integration.engine_support import NEAR_TIE, VOCAB, greedy, prompt, serve, write_checkpoint
from plugin_package.installing import install

MODEL = EXAMPLE | {"vocab_size": VOCAB}


def installed(kind: Kind, name: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = directory / "source"
    source.mkdir()
    for file, text in package(kind, name).items():
        if not file.startswith("test_"):
            (source / file).write_text(text, "utf-8")
    install(source, directory)
    monkeypatch.syspath_prepend(str(directory))


def compare(checkpoint: Path, model: torch.nn.Module) -> None:
    """Greedy tokens are the best of `model` in float64, wherever that is clear."""
    with serve(checkpoint, cache={"num_blocks": 24}) as engine:
        done = engine.generate(prompt(20), greedy(12))
    ids = [*done.prompt_token_ids, *done.token_ids]
    with torch.inference_mode():
        best = model.eval().double()(torch.tensor([ids])).logits[0, len(done.prompt_token_ids) - 1 : -1].topk(2)
    clear = (best.values[:, 0] - best.values[:, 1]) > NEAR_TIE
    assert clear.sum() > len(done.token_ids) // 2
    assert torch.equal(torch.tensor(done.token_ids)[clear], best.indices[clear, 0])


def test_a_checkpoint_of_the_quantisation_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed("quant_method", "acme-int8", tmp_path, monkeypatch)
    checkpoint = write_checkpoint(tmp_path / "model", MODEL)
    [file] = checkpoint.glob("*.safetensors")
    tensors, rounded = load_file(file), random_transformers_model(MODEL, 0)
    for name, weight in list(tensors.items()):
        if name.endswith("_proj.weight"):
            scale = weight.abs().max() / 127
            tensors[name] = (weight / scale).round().to(torch.int8)
            tensors[f"{name}_scale"] = scale.reshape(1)
            rounded.get_parameter(name).data = tensors[name].float() * scale
    save_file(tensors, file)
    section = {"quantization_config": {"quant_method": "acme-int8"}}
    (checkpoint / "config.json").write_text(json.dumps(MODEL | section))
    compare(checkpoint, rounded)


def test_a_checkpoint_of_the_model_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed("model", "acme", tmp_path, monkeypatch)
    checkpoint = write_checkpoint(tmp_path / "model", MODEL)
    own = MODEL | {"architectures": ["AcmeForCausalLM"]}
    (checkpoint / "config.json").write_text(json.dumps(own))
    compare(checkpoint, random_transformers_model(MODEL, 0))
