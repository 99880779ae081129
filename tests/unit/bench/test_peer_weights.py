"""The weights that other engines are given: int8 checkpoints, and random models behind a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.peers.int8_checkpoint import write_w8a8
from bench.peers.prepare import make
from bench.peers.random_gguf import RandomModel, write_random
from infer import Engine, EngineConfig, SamplingParams


def test_int8_weights_are_within_half_a_step_of_what_they_were(tmp_path: Path) -> None:
    source, target = tmp_path / "hf", tmp_path / "w8a8"
    source.mkdir()
    torch.manual_seed(0)
    plain = {
        "model.layers.0.mlp.up_proj.weight": torch.randn(8, 16).bfloat16(),
        "model.norm.weight": torch.ones(16).bfloat16(),
    }
    plain["model.layers.0.mlp.up_proj.weight"][3] = 0.0
    save_file(plain, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps({"hidden_size": 16}))
    (source / "tokenizer.json").write_text("{}")
    assert write_w8a8(source, target)
    found = load_file(target / "model.safetensors")
    scale = found["model.layers.0.mlp.up_proj.weight_scale"].float()
    quantized = found["model.layers.0.mlp.up_proj.weight"]
    assert quantized.dtype == torch.int8
    error = (quantized.float() * scale - plain["model.layers.0.mlp.up_proj.weight"].float()).abs()
    assert bool((error <= 0.51 * scale + 127 * scale / 256).all())  # the scale itself is rounded to bf16
    assert torch.equal(found["model.norm.weight"], plain["model.norm.weight"])
    written = json.loads((target / "config.json").read_text())
    assert written["hidden_size"] == 16
    assert written["quantization_config"]["config_groups"]["group_0"]["input_activations"]["dynamic"] is True
    assert (target / "tokenizer.json").exists()


@pytest.fixture
def donor(tmp_path: Path) -> Path:
    donor = tmp_path / "donor.gguf"
    writer = gguf.GGUFWriter(str(donor), "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(40)])
    writer.add_bos_token_id(1)
    writer.add_tensor("token_embd.weight", np.zeros((40, 8), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return donor


def test_a_random_model_has_its_shape_and_the_tokenizer_it_was_given(donor: Path, tmp_path: Path) -> None:
    target = tmp_path / "random.gguf"
    assert write_random(donor, target, RandomModel(hidden=64, layers=2, heads=4, kv_heads=2, intermediate=96))
    reader = gguf.GGUFReader(str(target))
    assert reader.fields["tokenizer.ggml.tokens"].contents() == [f"t{i}" for i in range(40)]
    assert reader.fields["tokenizer.ggml.bos_token_id"].contents() == 1
    assert reader.fields["llama.block_count"].contents() == 2
    shapes = {tensor.name: tuple(int(n) for n in tensor.shape) for tensor in reader.tensors}
    assert shapes["token_embd.weight"] == (64, 40)
    assert shapes["blk.1.attn_k.weight"] == (64, 32)
    assert shapes["blk.1.ffn_down.weight"] == (96, 64)
    [up] = [tensor for tensor in reader.tensors if tensor.name == "blk.0.ffn_up.weight"]
    values = gguf.quants.dequantize(up.data, up.tensor_type)
    assert values.shape == (96, 64)
    assert 0.5 / 8 < values.std() < 2 / 8


def test_a_random_model_with_experts_is_read_by_the_engine(donor: Path, tmp_path: Path) -> None:
    target = tmp_path / "random.gguf"
    model = RandomModel(hidden=64, layers=2, heads=4, kv_heads=2, intermediate=96, experts=4, chosen=2)
    assert write_random(donor, target, model)
    config = EngineConfig(model={"ref": str(target), "skip_tokenizer": True}, cache={"num_blocks": 4})
    with Engine.blocking(config) as engine:
        assert engine.engine.resolved.memory.weights > 2 * 4 * 3 * 64 * 96 * 2
        answer = engine.generate([1, 2, 3], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
    assert len(answer.token_ids) == 2 and max(answer.token_ids) < 40


def test_what_was_interrupted_is_made_again(tmp_path: Path) -> None:
    target, calls = tmp_path / "x.gguf", []

    def build(path: Path, done: bool) -> bool:
        assert not path.exists()
        path.write_text("half" if not done else "whole")
        calls.append(done)
        return done

    make(target, lambda path: build(path, False))
    assert not target.exists()
    make(target, lambda path: build(path, True))
    make(target, lambda path: build(path, True))
    assert target.read_text() == "whole"
    assert calls == [False, True]
