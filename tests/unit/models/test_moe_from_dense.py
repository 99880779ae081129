"""Sparse checkpoints out of dense ones: without noise the same model, with noise real routes; transformers judges both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from infer import Engine, EngineConfig, SamplingParams
from infer.errors import UnsupportedModelError
from infer.models import llama, qwen2, qwen3
from infer.testing.moe_from_dense import moe_from_dense
from infer.testing.tiny_models import random_transformers_model

LLAMA, QWEN3 = llama.infer_models()[0].example | {"head_dim": 16}, qwen3.EXAMPLE
CASES = {
    "llama-mixtral": (LLAMA, 1, "MixtralForCausalLM", [0, 1]),
    "llama-qwen2-moe": (LLAMA | {"tie_word_embeddings": False}, 2, "Qwen2MoeForCausalLM", [1]),
    "qwen3-qwen3-moe": (QWEN3, 2, "Qwen3MoeForCausalLM", [1]),
}
IDS = torch.arange(3, 60)[None]


def dense_checkpoint(config: dict[str, Any], directory: Path) -> Any:
    """A random dense model whose weights bf16 holds exactly, so that storing the sparse one rounds nothing."""
    model = random_transformers_model(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    model.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer_config.json").write_text('{"carried": true}')
    return model


def sparse_oracle(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), f"transformers reads the checkpoint otherwise: {report}"
    return model.eval()


@pytest.mark.parametrize("name", CASES)
def test_without_noise_it_computes_what_the_dense_model_does(name: str, tmp_path: Path) -> None:
    config, step, architecture, sparse = CASES[name]
    dense = dense_checkpoint(config, tmp_path / "dense")
    made = moe_from_dense(tmp_path / "dense", tmp_path / "moe", num_experts=6, top_k=3, sparse_step=step, noise=0.0)
    written = json.loads((made / "config.json").read_text())
    assert written["architectures"] == [architecture]
    assert (made / "tokenizer_config.json").read_text() == '{"carried": true}'
    oracle = sparse_oracle(made)
    with torch.no_grad():
        expected = dense(IDS).logits
        got = oracle(IDS, output_router_logits=True)
    torch.testing.assert_close(got.logits, expected, rtol=0, atol=1e-4)
    assert len(got.router_logits) == len(sparse)
    for logits in got.router_logits:
        ids = logits.topk(3, dim=-1).indices
        assert logits.shape[-1] == len(ids.unique()) == 6, "every expert is used"


def test_noise_and_seed_make_other_experts(tmp_path: Path) -> None:
    dense = dense_checkpoint(LLAMA, tmp_path / "dense")
    logits = {}
    for name, noise, seed in (("a", 0.1, 0), ("again", 0.1, 0), ("other", 0.1, 1), ("far", 1.0, 0)):
        moe_from_dense(tmp_path / "dense", tmp_path / name, noise=noise, seed=seed)
        with torch.no_grad():
            logits[name] = sparse_oracle(tmp_path / name)(IDS).logits
    with torch.no_grad():
        expected = dense(IDS).logits
    assert torch.equal(logits["a"], logits["again"])
    assert not torch.equal(logits["a"], logits["other"])
    near, far = ((logits[name] - expected).abs().mean() for name in ("a", "far"))
    assert 0 < near < far / 3


@pytest.mark.parametrize(
    ("config", "named"),
    [(qwen2.EXAMPLE, "Qwen2ForCausalLM"), (LLAMA | {"mlp_bias": True}, "LlamaForCausalLM with mlp_bias")],
    ids=["architecture", "bias"],
)
def test_what_cannot_be_made_sparse_is_refused(config: dict[str, Any], named: str, tmp_path: Path) -> None:
    dense_checkpoint(config, tmp_path / "dense")
    with pytest.raises(UnsupportedModelError, match=named):
        moe_from_dense(tmp_path / "dense", tmp_path / "moe")
    assert not (tmp_path / "moe").exists()


@pytest.mark.model
def test_a_sparse_smollm2_still_speaks_english(smollm2_gguf: Path, tmp_path: Path) -> None:
    """Through the engine from text to text, and token by token against transformers over the same files."""
    made = moe_from_dense(smollm2_gguf, tmp_path / "moe", num_experts=4, sparse_step=10, noise=0.1)
    text = "The capital of France is"
    config = EngineConfig(
        model={"ref": str(made), "dtype": "float32"},
        scheduler={"max_num_seqs": 2, "max_num_batched_tokens": 64},
        cache={"num_blocks": 16},
        platform={"threads": 1},
    )
    with Engine.blocking(config) as engine:
        done = engine.generate(text, SamplingParams(temperature=0, max_tokens=12))
    assert done.text.startswith(" Paris")
    oracle = sparse_oracle(made)
    fed = torch.tensor([[*done.prompt_token_ids, *done.token_ids]])[:, :-1]
    with torch.no_grad():
        judged = oracle(fed, output_router_logits=True)
    assert list(done.token_ids) == judged.logits[0, len(done.prompt_token_ids) - 1 :].argmax(-1).tolist()
    assert len(judged.router_logits) == 3
    for logits in judged.router_logits:
        ids = logits.topk(2, dim=-1).indices
        assert len(ids.unique()) == 4 and len(ids.unique(dim=0)) > 3, f"hardly a choice: {ids.tolist()}"
