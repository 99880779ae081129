"""A GGUF read as a Hugging Face checkpoint: names, row order, norm offset, dtypes, and what it refuses."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from gguf_samples import LLAMA_METADATA, LLAMA_NAMES, llama_tensors, llama_weights, write_gguf, write_llama
from infer.errors import UnsupportedModelError, WeightError
from infer.weights import gguf_checkpoint
from infer.weights.gguf_checkpoint import GGUFCheckpoint


@pytest.mark.parametrize("type_name", ["F32", "F16"])
def test_every_tensor_comes_back_as_it_was_before_conversion(tmp_path: Path, type_name: str) -> None:
    checkpoint = GGUFCheckpoint(write_llama(tmp_path / "m.gguf", type_name), LLAMA_NAMES)
    weights = llama_weights()
    assert set(checkpoint.tensors()) == set(weights)
    for name, value in weights.items():
        expected = torch.from_numpy(value)
        info = checkpoint.tensors()[name]
        matrix = expected.dim() > 1
        assert info.shape == tuple(expected.shape) and info.stored_dtype == (type_name if matrix else "F32")
        stored = checkpoint.read(name, None)
        assert stored.dtype == (torch.float16 if matrix and type_name == "F16" else torch.float32)
        assert torch.equal(stored, expected.to(stored.dtype))
        assert torch.equal(checkpoint.read(name, torch.bfloat16), expected.to(stored.dtype).bfloat16())
    checkpoint.close()


@pytest.mark.parametrize("type_name", ["Q4_0", "Q8_0", "BF16"])
def test_quantised_rows_are_reordered_whole(tmp_path: Path, type_name: str) -> None:
    checkpoint = GGUFCheckpoint(write_llama(tmp_path / "m.gguf", type_name), LLAMA_NAMES)
    kind = gguf.GGMLQuantizationType[type_name]
    for name, value in llama_weights().items():
        if value.ndim < 2:
            continue
        expected = gguf.quants.dequantize(gguf.quants.quantize(value, kind), kind)
        assert torch.equal(checkpoint.read(name, torch.float32), torch.from_numpy(expected))


def test_result_does_not_depend_on_the_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = GGUFCheckpoint(write_llama(tmp_path / "m.gguf", "Q8_0"), LLAMA_NAMES)
    whole = {name: checkpoint.read(name, None) for name in checkpoint.tensors()}
    for size in (1, 64 * 5, 1 << 30):
        monkeypatch.setattr(gguf_checkpoint, "CHUNK_ELEMENTS", size)
        assert all(torch.equal(checkpoint.read(name, None), value) for name, value in whole.items())


def test_result_owns_its_memory(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf")
    checkpoint = GGUFCheckpoint(path, LLAMA_NAMES)
    value = checkpoint.read("model.norm.weight", None)
    before = value.clone()
    checkpoint.close()
    path.write_bytes(b"")
    assert torch.equal(value, before)
    assert value.untyped_storage().nbytes() == value.nbytes


def test_norm_offset_and_biases(tmp_path: Path) -> None:
    names = dataclasses.replace(LLAMA_NAMES, norm_offset=1.0)
    weights = llama_weights()
    tensors = llama_tensors(weights)
    bias = np.arange(64, dtype=np.float32)
    interleaved = np.stack([bias.reshape(4, 2, 8)[:, 0], bias.reshape(4, 2, 8)[:, 1]], axis=-1).reshape(-1)
    tensors["blk.0.attn_q.bias"] = (interleaved, "F32")
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", tensors, LLAMA_METADATA), names)
    for name in ("model.norm.weight", "model.layers.0.input_layernorm.weight"):
        assert torch.equal(checkpoint.read(name, None), torch.from_numpy(weights[name] - 1.0))
    down = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(checkpoint.read(down, None), torch.from_numpy(weights[down]))
    assert torch.equal(checkpoint.read("model.layers.0.self_attn.q_proj.bias", None), torch.from_numpy(bias))


def test_stacked_experts_keep_their_three_dimensions(tmp_path: Path) -> None:
    names = dataclasses.replace(LLAMA_NAMES, tensors={"blk.{i}.ffn_gate_exps.weight": "layers.{i}.experts"})
    value = np.random.default_rng(1).standard_normal((3, 5, 32)).astype(np.float32)
    path = write_gguf(tmp_path / "m.gguf", {"blk.11.ffn_gate_exps.weight": (value, "F32")}, LLAMA_METADATA)
    assert torch.equal(GGUFCheckpoint(path, names).read("layers.11.experts", None), torch.from_numpy(value))


def test_skipped_tensors_are_named_and_others_refused(tmp_path: Path) -> None:
    tensors = llama_tensors(llama_weights())
    tensors["rope_freqs.weight"] = (np.ones(8, np.float32), "F32")
    tensors["blk.0.attn_rot_embd.weight"] = (np.ones(8, np.float32), "F32")
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", tensors, LLAMA_METADATA), LLAMA_NAMES)
    assert checkpoint.skipped == ("rope_freqs.weight", "blk.0.attn_rot_embd.weight")
    assert len(checkpoint.tensors()) + len(checkpoint.skipped) == len(tensors)
    tensors["blk.0.surprise.weight"] = (np.ones(8, np.float32), "F32")
    with pytest.raises(WeightError, match=r"blk\.0\.surprise\.weight") as caught:
        GGUFCheckpoint(write_gguf(tmp_path / "m2.gguf", tensors, LLAMA_METADATA), LLAMA_NAMES)
    assert caught.value.tensor == "blk.0.surprise.weight"


def test_two_tensors_with_one_meaning_are_refused(tmp_path: Path) -> None:
    names = dataclasses.replace(LLAMA_NAMES, tensors={"a": "same", "b": "same"})
    one = (np.ones(8, np.float32), "F32")
    with pytest.raises(WeightError, match="both 'same'"):
        GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", {"a": one, "b": one}, LLAMA_METADATA), names)


def test_unsupported_type_names_itself_and_the_tensor(tmp_path: Path) -> None:
    tensors = llama_tensors(llama_weights())
    tensors["output.weight"] = (np.zeros((32, 2 * 18), np.uint8), "IQ4_NL")
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", tensors, LLAMA_METADATA), LLAMA_NAMES)
    with pytest.raises(UnsupportedModelError, match=r"output\.weight.*IQ4_NL"):
        checkpoint.read("lm_head.weight", None)


def test_heads_that_do_not_divide_the_rows(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf", llama__attention__head_count=3)
    with pytest.raises(WeightError, match="num_attention_heads=3"):
        GGUFCheckpoint(path, LLAMA_NAMES).read("model.layers.0.self_attn.q_proj.weight", None)


def test_unknown_name(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="no tensor 'nothing'"):
        GGUFCheckpoint(write_llama(tmp_path / "m.gguf"), LLAMA_NAMES).read("nothing", None)


@pytest.mark.model
@pytest.mark.row("LOAD-GGUF", "each block type dequantizes bit-equal to gguf-py's dequantize")
def test_all_tensors_of_the_real_model_equal_gguf_py(smollm2_gguf: Path) -> None:
    checkpoint = GGUFCheckpoint(smollm2_gguf, LLAMA_NAMES)
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm2_gguf).tensors}
    assert checkpoint.skipped == () and len(checkpoint.tensors()) == len(theirs) == 272
    for stored, name in LLAMA_NAMES.tensors.items():
        for layer in range(30) if "{i}" in stored else (0,):
            tensor = theirs.pop(stored.replace("{i}", str(layer)), None)
            if tensor is None:
                continue
            expected = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
            heads = 9 if ".attn_q." in stored else 3 if ".attn_k." in stored else 0
            if heads:  # 64 rows per head: even ones first
                expected = expected.view(heads, 64, -1)
                expected = torch.cat((expected[:, 0::2], expected[:, 1::2]), dim=1).view(heads * 64, -1)
            assert torch.equal(checkpoint.read(name.replace("{i}", str(layer)), torch.float32), expected), stored
    assert not theirs
