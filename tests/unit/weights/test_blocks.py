"""Which weights of a GGUF stay in their blocks, what memory they take, and that the model computes with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from gguf_samples import LLAMA_METADATA, llama_tensors, llama_weights, write_block_llama, write_gguf, write_llama
from infer import Engine, EngineConfig, SamplingParams
from infer.backends.cpu.block_formats import BLOCK_FORMATS
from infer.backends.reference.platform import OPS
from infer.config.engine import PlatformSection
from infer.errors import WeightError
from infer.layers.parameter import Layer, Parameter, named_parameters
from infer.models import llama
from infer.plugins.platform import BlockOps
from infer.quantization.unquantized import UnquantizedMethod
from infer.testing.tiny_models import build_model, model_config
from infer.weights.blocks import keep_stored_blocks

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


def test_blocks_of_a_transposed_tensor_do_not_stay() -> None:
    """They lie along the features that a product does not sum over."""
    facts = llama.EXAMPLE | {"hidden_size": 64, "head_dim": 16}
    model = build_model(llama.infer_models()[0], model_config(facts), ops=OPS, quant=UnquantizedMethod(), device="meta")
    targets, name = model.weight_table().targets, "model.layers.1.self_attn.o_proj.weight"
    targets[name] = replace(targets[name], transposed=True)

    def unused(*arguments: object) -> Any:
        raise AssertionError("nothing is multiplied here")

    formats = BlockOps(formats=BLOCK_FORMATS, row_multiple=1, pack=unused, rows=unused, linear=unused)
    keep_stored_blocks(model, dict.fromkeys(targets, "Q8_0"), formats)
    slots = named_parameters(cast(Layer, model))
    assert slots["blocks.0.attention.out.weight"].blocks == "Q8_0"
    assert slots["blocks.1.attention.out.weight"].blocks is None


@pytest.mark.parametrize("kinds", [("Q8_0", "Q8_0", "Q4_0"), ("Q4_1", "Q8_0", "Q5_0"), ("Q4_0", "Q8_0", "Q4_0")])
async def test_parts_of_a_weight_keep_their_own_types(tmp_path: Path, kinds: tuple[str, str, str]) -> None:
    """q, k and v share one parameter, as gate and up do; each is multiplied with in the blocks it is stored in."""
    tensors = llama_tensors(llama_weights(), "Q8_0")
    types = dict(zip(("attn_q", "attn_k", "attn_v"), kinds, strict=True)) | {"ffn_up": kinds[2]}
    for name, (values, _) in list(tensors.items()):
        if name.split(".")[-2] in types:
            tensors[name] = (values, types[name.split(".")[-2]])
    mixed = write_gguf(tmp_path / "mixed.gguf", tensors, LLAMA_METADATA)
    planned, taken, logprobs = await weights_and_logprobs(config(mixed))
    expanded_size, _, others = await weights_and_logprobs(config(mixed, expand=True))
    assert planned == taken == sum(t.nbytes for t in _tensors(mixed))
    assert expanded_size > 3 * taken
    assert torch.tensor(logprobs).sub(torch.tensor(others)).abs().max() < 1.5 and logprobs != others
    reference, _, _ = await weights_and_logprobs(config(mixed, platform="reference"))
    assert reference == expanded_size, "a platform without such kernels expands"


async def test_a_replayed_step_computes_with_all_parts(tmp_path: Path) -> None:
    tensors = llama_tensors(llama_weights(), "Q8_0")
    tensors = {n: (v, "Q4_0" if n.endswith("attn_v.weight") else k) for n, (v, k) in tensors.items()}
    mixed = write_gguf(tmp_path / "mixed.gguf", tensors, LLAMA_METADATA)
    answers = []
    for graphs in (True, False):
        async with Engine(config(mixed).model_copy(update={"platform": PlatformSection(graphs=graphs)})) as engine:
            done = await engine.generate(
                PROMPT, SamplingParams(max_tokens=20, temperature=0, logprobs=1, ignore_eos=True)
            )
            assert done.logprobs is not None
            answers.append((done.token_ids, [entry.logprob for entry in done.logprobs]))
    assert answers[0] == answers[1]


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


def test_parts_take_their_own_rows_only() -> None:
    slot = Parameter(torch.empty(48, 64), role="linear")
    slot.divide([(32, "Q8_0", 68), (16, "Q4_0", 36)])
    stored = torch.randint(0, 256, (48, 68), dtype=torch.uint8)
    slot.load(stored[16:32], (16, 32))
    slot.load(stored[:16], (0, 16))
    slot.load(stored[32:, :36], (32, 48))
    first, second = slot.parts
    assert torch.equal(first.data, stored[:32]) and torch.equal(second.data, stored[32:, :36])
    assert slot.blocks == "Q8_0+Q4_0" and slot.shape == (48, 64)
    with pytest.raises(WeightError, match=r"rows 16\.\.48 lie in parts with blocks of different types"):
        slot.load(stored, (16, 48))
    with pytest.raises(WeightError, match="filled before"):
        slot.load(stored[:16], (0, 16))
    with pytest.raises(WeightError, match="does not fit"):
        slot.load(stored[32:], (32, 48))
