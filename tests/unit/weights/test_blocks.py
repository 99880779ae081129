"""Which weights of a GGUF stay in their blocks, what memory they take, and that the model computes with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gguf_samples import LLAMA_METADATA, llama_tensors, llama_weights, write_block_llama, write_gguf, write_llama
from infer import Engine, EngineConfig, SamplingParams
from infer.backends.cpu.block_formats import BLOCK_FORMATS

pytestmark = pytest.mark.anyio
PROMPT = [3, 17, 9, 4, 30, 22, 11]


def config(path: Path, *, expand: bool = False, platform: str = "cpu") -> EngineConfig:
    return EngineConfig(
        model={"ref": str(path), "skip_tokenizer": True, "expand_quantized": expand, "dtype": "float32"},
        platform={"name": platform, "threads": 1},
        cache={"num_blocks": 16},
    )


async def weights_and_logprobs(asked: EngineConfig) -> tuple[int, int, list[float]]:
    """(planned bytes of weights, bytes they take, log-probabilities of the prompt)."""
    async with Engine(asked) as engine:
        done = await engine.generate(PROMPT, SamplingParams(max_tokens=1, prompt_logprobs=0, seed=0))
        measured = engine._open_parts().executor._worker.measured()["weights"]  # type: ignore[attr-defined]
        assert done.prompt_logprobs is not None
        return engine.resolved.memory.weights, measured, [e.logprob for e in done.prompt_logprobs if e is not None]


@pytest.mark.parametrize("kind", sorted(BLOCK_FORMATS))
async def test_blocks_stay_and_compute_what_expanded_weights_do(tmp_path: Path, kind: str) -> None:
    path = write_block_llama(tmp_path / "model.gguf", kind)
    planned, taken, stayed = await weights_and_logprobs(config(path))
    planned_expanded, _, expanded = await weights_and_logprobs(config(path, expand=True))
    stored = sum(t.nbytes for t in _tensors(path))
    assert planned == taken == stored
    assert planned_expanded > 3 * planned
    # int8 activations: about half a per cent per product
    assert (
        torch.tensor(stayed).sub(torch.tensor(expanded)).abs().max() < 1.0
    )  # of about 12; a wrong row would be off by several
    assert stayed != expanded


async def test_a_weight_of_mixed_types_is_expanded(tmp_path: Path) -> None:
    """q, k and v share one parameter: they stay only if all of them are stored alike."""
    tensors = llama_tensors(llama_weights(), "Q8_0")
    values, _ = tensors["blk.0.attn_v.weight"]
    tensors["blk.0.attn_v.weight"] = (values, "Q4_0")
    mixed = write_gguf(tmp_path / "mixed.gguf", tensors, LLAMA_METADATA)
    plain = write_llama(tmp_path / "plain.gguf", "Q8_0")
    planned, taken, logprobs = await weights_and_logprobs(config(mixed))
    whole, _, _ = await weights_and_logprobs(config(plain))
    _, _, others = await weights_and_logprobs(config(mixed, expand=True))
    assert planned == taken > whole
    assert torch.tensor(logprobs).sub(torch.tensor(others)).abs().max() < 1.0


async def test_a_platform_without_such_kernels_expands(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "model.gguf", "Q4_0")
    reference, _, logprobs = await weights_and_logprobs(config(path, platform="reference"))
    expanded, _, native = await weights_and_logprobs(config(path, expand=True))
    assert reference == expanded
    assert torch.allclose(torch.tensor(logprobs), torch.tensor(native), atol=1e-4)


def _tensors(path: Path) -> list[object]:
    from infer.weights.gguf import GGUFFile

    with GGUFFile.open(path) as file:
        return list(file.tensors.values())
