"""Weights that become blocks while a model is loaded: which, what memory they take, what the model then computes, refusals."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, quants
from safetensors.torch import load_file, save_file
from torch import Tensor

from gguf_samples import write_llama
from infer import Engine, EngineConfig, SamplingParams
from infer.artifacts.provenance import engine_provenance
from infer.backends.reference.platform import OPS
from infer.config.engine import PluginsSection
from infer.errors import ConfigError, WeightError
from infer.layers.parameter import Parameter, named_parameters
from infer.models import llama, qwen3_moe
from infer.plugins.manager import build_registry
from infer.plugins.platform import BlockFormat, BlockOps
from infer.quantization.unquantized import UnquantizedMethod
from infer.quantization.weight_only import create_int4, create_int8
from infer.testing.tiny_models import build_model, make_checkpoint, model_config
from infer.weights.at_load import quantize_at_load

pytestmark = pytest.mark.anyio
PROMPT = [3, 17, 9, 4, 30, 22, 11]
LLAMA = llama.infer_models()[0].example | {"intermediate_size": 64}
MOE = qwen3_moe.EXAMPLE | {"intermediate_size": 64, "moe_intermediate_size": 32}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {"llama": LLAMA, "moe": MOE, "odd": LLAMA | {"intermediate_size": 40}}
    return {name: make_checkpoint(config, tmp_path_factory.mktemp(name)) for name, config in made.items()}


def config(path: Path, method: str | None, platform: str = "cpu", **model: Any) -> EngineConfig:
    return EngineConfig(
        model={"ref": str(path), "skip_tokenizer": True, "dtype": "float32", "quantization": method, **model},
        platform={"name": platform, "threads": 1},
        cache={"num_blocks": 16},
    )


async def run(asked: EngineConfig) -> tuple[int, Tensor, tuple[str, ...]]:
    """(bytes of weights, log-probabilities of the prompt, notices); what was planned is what there is."""
    async with Engine(asked) as engine:
        done = await engine.generate(PROMPT, SamplingParams(max_tokens=1, prompt_logprobs=0, seed=0))
        taken = engine._open_parts().executor._worker.measured()["weights"]  # type: ignore[attr-defined]
        assert taken == engine.resolved.memory.weights
        method = asked.model.quantization
        assert engine.resolved.quantization == method
        assert engine.model_config.identity.endswith(f"+{method}") == (method is not None)
        assert engine_provenance(engine.model_config, engine.resolved).numerics.weights_dtype == (method or "float32")
        assert done.prompt_logprobs is not None
        logprobs = torch.tensor([entry.logprob for entry in done.prompt_logprobs if entry is not None])
        return taken, logprobs, engine.resolved.notices


def read_back(source: Path, target: Path, kind: str) -> Path:
    """A plain checkpoint of the numbers in the blocks."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and not name.endswith("mlp.gate.weight"):
            its = "Q8_0" if "embed_tokens" in name or "lm_head" in name else kind
            blocks = create_int4(None).encode(tensor, its).numpy()
            tensors[name] = torch.from_numpy(quants.dequantize(blocks, GGMLQuantizationType[its]).copy())
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("name", ["llama", "moe"])
@pytest.mark.parametrize(("method", "bits"), [("int8", 8.5), ("int4", 5.0)])
async def test_blocks_are_made_and_computed_with(
    checkpoints: dict[str, Path], tmp_path: Path, name: str, method: str, bits: float
) -> None:
    plain, exact, _ = await run(config(checkpoints[name], None))
    taken, native, notices = await run(config(checkpoints[name], method))
    expanded_size, expanded, words = await run(config(checkpoints[name], method, "reference"))
    assert notices == () or not any("quantization" in notice for notice in notices)
    assert plain * bits / 32 < taken < 0.4 * plain, "the embedding and the head have 8 bits, norms and routers stay"
    # The reference computes with the same numbers, in the memory of plain weights, and says so.
    assert expanded_size == plain and any("take the memory of plain weights" in word for word in words)
    assert 0 < (native - expanded).abs().max() < 0.1, "activations in int8"
    assert (expanded - exact).abs().max() > 0
    rounded = read_back(checkpoints[name], tmp_path / "rounded", "Q8_0" if method == "int8" else "Q4_1")
    _, expected, _ = await run(config(rounded, None, "reference"))
    assert torch.equal(expanded, expected), "the numbers that gguf-py reads from the blocks"
    _, asked_for, _ = await run(config(checkpoints[name], method, expand_quantized=True))
    torch.testing.assert_close(asked_for, expanded, rtol=0, atol=1e-4)


async def test_a_plain_gguf_becomes_blocks_too(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "plain.gguf", "F16")
    plain, exact, _ = await run(config(path, None))
    taken, logprobs, _ = await run(config(path, "int8"))
    assert taken < 0.3 * plain and (logprobs - exact).abs().max() < 1.0  # of about 12


async def test_weights_that_do_not_divide_stay_and_are_named(checkpoints: dict[str, Path]) -> None:
    _, _, notices = await run(config(checkpoints["odd"], "int8"))
    (notice,) = (notice for notice in notices if "model.quantization" in notice)
    assert "2 weights stay plain" in notice and "blocks.0.mlp.down" in notice


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("int5", r"model\.quantization='int5' is unknown; .* int4, int8"),
        ("unquantized", r"'unquantized' is unknown"),
    ],
)
async def test_unknown_methods_are_refused(checkpoints: dict[str, Path], method: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        await run(config(checkpoints["llama"], method))
    assert caught.value.fields == ("model.quantization",)


async def test_what_is_quantised_already_is_refused(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "model.gguf", "Q4_0")
    with pytest.raises(ConfigError, match=r"model\.quantization=int8: .*model\.gguf is quantised already \(Q4_0\)"):
        await run(config(path, "int8"))


async def test_a_model_without_such_weights_is_refused(tmp_path: Path) -> None:
    odd = LLAMA | {"hidden_size": 40, "head_dim": 8, "intermediate_size": 24}
    path = make_checkpoint(odd, tmp_path / "odd")
    with pytest.raises(ConfigError, match=r"none of the 9 weights has rows in multiples of 16"):
        await run(config(path, "int8"))


def tiny(spec: Any, facts: dict[str, Any]) -> Any:
    return build_model(spec, model_config(facts), ops=OPS, quant=UnquantizedMethod())


BLOCKS = BlockOps(
    formats={"Q8_0": BlockFormat(32, 34), "Q4_1": BlockFormat(32, 20)},
    row_multiple=16,
    pack=lambda stored, kind: stored,
    rows=lambda *_: torch.empty(0),
    linear=lambda *_: torch.empty(0),
    moe=lambda *_: torch.empty(0),
)


def test_which_weights() -> None:
    model = tiny(qwen3_moe.infer_models()[0], MOE)
    made = quantize_at_load(model, create_int4(None), BLOCKS, torch.bfloat16)
    kinds = {path: p.blocks for path, p in named_parameters(model).items() if path.startswith(("e", "h", "blocks.0"))}
    assert {path: kind for path, kind in kinds.items() if kind} == {
        "embedding.weight": "Q8_0",
        "head.weight": "Q8_0",
        "blocks.0.attention.qkv.weight": "Q4_1",
        "blocks.0.attention.out.weight": "Q4_1",
        "blocks.0.mlp.gate_up": "Q4_1",
        "blocks.0.mlp.down": "Q4_1",
    }
    assert not made.expanded and not made.left
    assert {path for path, kind in kinds.items() if not kind} >= {"blocks.0.mlp.router"}
    expert = named_parameters(model)["blocks.0.mlp.gate_up"]
    assert expert.in_flight == expert.unit * expert.shape[1] * 2, "one expert's matrices, as stored"


def test_a_platform_without_block_experts_expands_them() -> None:
    model = tiny(qwen3_moe.infer_models()[0], MOE)
    made = quantize_at_load(model, create_int8(None), dataclasses.replace(BLOCKS, moe=None), torch.float32)
    assert {path.rpartition(".")[2] for path in made.expanded} == {"gate_up", "down"}
    assert made.in_blocks


def test_shards_are_converted_into_their_rows() -> None:
    model = tiny(llama.infer_models()[0], LLAMA)
    quantize_at_load(model, create_int8(None), BLOCKS, torch.float32)
    slot: Parameter = named_parameters(model)["blocks.0.mlp.gate_up.weight"]
    gate, up = torch.randn(64, 32), torch.randn(64, 32)
    slot.load(up, (64, 128))
    slot.load(gate, (0, 64))
    assert torch.equal(slot.data, create_int8(None).encode(torch.cat((gate, up)), "Q8_0"))
    other: Parameter = named_parameters(model)["blocks.1.mlp.gate_up.weight"]
    with pytest.raises(WeightError, match=r"shape \(64, 34\) does not fit \(64, 32\)"):
        other.load(torch.zeros(64, 34), (0, 64))


def test_every_registered_method_is_known_by_its_name() -> None:
    specs = build_registry(PluginsSection(allow=())).specs("quant_method")
    assert [spec.name for spec in specs if spec.at_load] == ["int4", "int8"]
