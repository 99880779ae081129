"""Weights of GPTQ, AWQ, compressed-tensors and fp8 checkpoints against fp64, as numbers, as blocks, and in a running model."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from infer import Engine, EngineConfig, SamplingParams
from infer.errors import InferError, UnsupportedModelError, WeightError
from infer.models import llama, qwen3_moe
from infer.quantization import awq, compressed_tensors, fp8, gptq
from infer.testing.tiny_models import make_checkpoint
from infer.weights.checkpoint import TensorInfo
from infer.weights.quantized_checkpoint import QuantizedCheckpoint
from quantized_checkpoints import WRITERS, quantize_checkpoint

MODULES: dict[str, ModuleType] = {"gptq": gptq, "awq": awq, "compressed-tensors": compressed_tensors, "fp8": fp8}
STORED = {torch.int32: "I32", torch.int64: "I64", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32",
          torch.int8: "I8", torch.float8_e4m3fn: "F8_E4M3"}  # fmt: skip


def compressed(
    form: str, bits: int, strategy: str, *, kind: str = "int", symmetric: bool = True, **rule: Any
) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "symmetric": symmetric, "strategy": strategy, **rule}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


SECTIONS: dict[str, tuple[dict[str, Any], str | None]] = {
    "gptq-4-sym": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}, "Q4_0"),
    "gptq-4-asym": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}, "Q4_1"),
    "gptq-4-v2": ({"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False, "checkpoint_format": "gptq_v2"}, "Q4_1"),
    "gptq-4-whole": ({"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": True, "desc_act": False}, "Q4_0"),
    "gptq-4-order": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": True}, None),
    "gptq-4-odd": ({"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": True}, None),
    "gptq-8-sym": ({"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": True}, "Q8_0"),
    "gptq-8-asym": ({"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": False}, None),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, "Q4_1"),
    "awq-whole": ({"quant_method": "awq", "bits": 4, "group_size": -1, "zero_point": True}, "Q4_1"),
    "w4a16": (compressed("pack-quantized", 4, "group", group_size=32), "Q4_0"),
    "w4a16-asym": (compressed("pack-quantized", 4, "group", group_size=32, symmetric=False), "Q4_1"),
    "w4a16-channel": (compressed("pack-quantized", 4, "channel"), "Q4_0"),
    "w8a16": (compressed("pack-quantized", 8, "channel"), "Q8_0"),
    "w8a8": (compressed("int-quantized", 8, "channel"), "Q8_0"),
    "w8a8-tensor": (compressed("int-quantized", 8, "tensor"), "Q8_0"),
    "w8a8-asym": (compressed("int-quantized", 8, "channel", symmetric=False), None),
    "w8a8-fp8": (compressed("float-quantized", 8, "channel", kind="float"), None),
    "w8a8-fp8-block": (compressed("float-quantized", 8, "block", kind="float", block_structure=[32, 48]), None),
    "fp8": ({"quant_method": "fp8", "activation_scheme": "static"}, None),
    "fp8-block": ({"quant_method": "fp8", "weight_block_size": [32, 48]}, None),
}  # fmt: skip
NAMES = sorted(SECTIONS)


class Stored:
    """A plain checkpoint of a few tensors, in memory."""

    def __init__(self, parts: dict[str, Tensor]) -> None:
        self.parts = parts

    def tensors(self) -> dict[str, TensorInfo]:
        return {n: TensorInfo(n, tuple(t.shape), STORED[t.dtype], t.nbytes) for n, t in self.parts.items()}

    def read(self, name: str, dtype: torch.dtype | None) -> Tensor:
        return self.parts[name] if dtype is None else self.parts[name].to(dtype)

    def read_blocks(self, name: str) -> Tensor:
        raise WeightError(f"no blocks of {name}")

    def metadata(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


def make(name: str, rows: int, columns: int, seed: int) -> tuple[QuantizedCheckpoint, np.ndarray, Stored]:
    section = SECTIONS[name][0]
    parts, exact = WRITERS[section["quant_method"]](np.random.default_rng(seed), rows, columns, section)
    stored = Stored({f"up_proj.{suffix}": part for suffix, part in parts.items()} | {"norm.weight": torch.ones(3)})
    form = MODULES[section["quant_method"]].read(section)
    return QuantizedCheckpoint(stored, form), exact, stored


@given(st.sampled_from(NAMES), st.integers(1, 12), st.integers(1, 4), st.integers(0, 2**31))
def test_numbers_are_those_of_fp64(name: str, tens: int, blocks: int, seed: int) -> None:
    checkpoint, exact, stored = make(name, 8 * tens, 64 * blocks, seed)
    assert checkpoint.tensors().keys() == {"up_proj.weight", "norm.weight"}
    assert checkpoint.tensors()["up_proj.weight"].shape == exact.shape
    got = checkpoint.read("up_proj.weight", torch.float32)
    np.testing.assert_allclose(got.double().numpy(), exact, rtol=2**-22, atol=0)
    assert torch.equal(checkpoint.read("norm.weight", None), stored.parts["norm.weight"])


@given(
    st.sampled_from([n for n in NAMES if SECTIONS[n][1]]), st.integers(1, 12), st.integers(1, 4), st.integers(0, 2**31)
)
def test_blocks_hold_the_same_numbers(name: str, tens: int, blocks: int, seed: int) -> None:
    """Read back by the `gguf` package. Only a minimum of Q4_1, the zero point times the scale, may be rounded."""
    checkpoint, exact, _ = make(name, 8 * tens, 64 * blocks, seed)
    kind = SECTIONS[name][1]
    assert kind is not None and checkpoint.block_types() == {"up_proj.weight": kind}
    got = quants.dequantize(checkpoint.read_blocks("up_proj.weight").numpy(), GGMLQuantizationType[kind])
    rounded = 15 * 2e-2 * 2.0**-11 if kind == "Q4_1" else 0.0
    np.testing.assert_allclose(got.astype(np.float64), exact, rtol=2**-20, atol=rounded)


@pytest.mark.parametrize("name", [n for n in NAMES if not SECTIONS[n][1]])
def test_what_fits_no_block_is_not_promised(name: str) -> None:
    assert make(name, 16, 96, 0)[0].block_types() == {}


def test_pieces_make_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        checkpoint, _, _ = make(name, 72, 64, 3)
        whole = checkpoint.read("up_proj.weight", torch.float32)
        with monkeypatch.context() as patch:
            patch.setattr("infer.weights.quantized_checkpoint.PIECE", 64 * 16)
            assert torch.equal(checkpoint.read("up_proj.weight", torch.float32), whole), name


REFUSED = [
    ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "bits=3"),
    ({"quant_method": "gptq", "group_size": 128}, "bits=None"),
    ({"quant_method": "gptq", "bits": 4}, "group_size=None"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size=0"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "marlin"}, "marlin"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {"-:.*": {}}}, "dynamic"),
    ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "gemv"),
    ({"quant_method": "awq", "bits": 8, "group_size": 128}, "bits=8"),
    ({"quant_method": "awq", "bits": 4, "group_size": "all"}, "group_size='all'"),
    ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": False}, "zero_point=False"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "e5m2"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, r"\[128\]"),
    ({"quant_method": "fp8", "weight_block_size": [0, 128]}, r"\[0, 128\]"),
    ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "config_groups=None"),
    (compressed("nvfp4-pack-quantized", 4, "tensor_group", kind="float"), "nvfp4-pack-quantized"),
    (compressed("marlin-24", 4, "group", group_size=32), "marlin-24"),
    (compressed("pack-quantized", 2, "group", group_size=32), "num_bits=2"),
    (compressed("pack-quantized", 4, "block", block_structure=[8, 8]), "'block'"),
    (compressed("pack-quantized", 4, "group", group_size="x"), "group_size='x'"),
    (compressed("float-quantized", 4, "group", kind="float", group_size=32), "num_bits=4"),
    (compressed("int-quantized", 8, "channel") | {"sparsity_config": {"format": "dense"}}, "sparsity_config"),
]


@pytest.mark.parametrize(("section", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_other_variants_are_refused_by_name(section: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        MODULES[section["quant_method"]].read(section)


def test_two_kinds_of_weights_in_one_checkpoint_are_refused() -> None:
    section = compressed("pack-quantized", 4, "group", group_size=32)
    other = compressed("pack-quantized", 8, "channel")["config_groups"]["group_0"]
    section["config_groups"]["group_1"] = other
    with pytest.raises(UnsupportedModelError, match="several kinds of weights"):
        compressed_tensors.read(section)


@pytest.mark.parametrize("name", NAMES)
def test_tensors_that_do_not_fit_are_named(name: str) -> None:
    """Each part in turn is missing, of another shape, of another dtype: an error that names it, or the number stays."""
    _, _, stored = make(name, 16, 96, 0)
    form = MODULES[SECTIONS[name][0]["quant_method"]].read(SECTIONS[name][0])
    needed = {source for weight in form.weights(stored.tensors()).values() for source in weight.sources.values()}
    main = {part for part in needed if part.endswith(("qweight", "weight_packed", ".weight"))}
    for part in needed - main:
        broken = [dict(stored.parts), dict(stored.parts), dict(stored.parts)]
        broken[0].pop(part)
        broken[1][part] = torch.zeros(7, 5, 3, dtype=stored.parts[part].dtype)
        broken[2][part] = stored.parts[part].to(torch.int8 if stored.parts[part].is_floating_point() else torch.float32)
        if part.endswith("g_idx"):
            broken.pop(0)
        for parts in broken:
            with pytest.raises(WeightError, match=part.replace(".", r"\.")):
                QuantizedCheckpoint(Stored(parts), form)


def test_zero_points_must_be_what_the_section_says() -> None:
    checkpoint, _, stored = make("gptq-4-sym", 16, 64, 0)
    stored.parts["up_proj.qzeros"][0, 0] += 1
    with pytest.raises(WeightError, match="zero points that are not 8"):
        checkpoint.read_blocks("up_proj.weight")


@pytest.mark.parametrize("name", ["gptq-4-sym", "gptq-4-order"])
@pytest.mark.parametrize("bad", [-1, 2, 10**9])
def test_groups_that_are_not_there_are_refused(name: str, bad: int) -> None:
    checkpoint, _, stored = make(name, 16, 64, 0)
    stored.parts["up_proj.g_idx"][5] = bad
    with pytest.raises(WeightError, match=r"g_idx' names group"):
        checkpoint.read("up_proj.weight", torch.float32)


@pytest.mark.parametrize("bad", [np.inf, np.nan, 1e30])
def test_scales_that_no_block_holds_are_refused(bad: float) -> None:
    checkpoint, _, stored = make("w8a8", 16, 64, 0)
    stored.parts["up_proj.weight_scale"][3] = bad
    with pytest.raises(WeightError, match=r"does not fit the fp16 scale of a block; set model\.expand_quantized=true"):
        checkpoint.read_blocks("up_proj.weight")


LLAMA = llama.infer_models()[0].example | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
MOE = qwen3_moe.EXAMPLE | {"hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 64}


async def prompt_logprobs(path: Path, platform: str, **model: Any) -> tuple[Tensor, int, tuple[str, ...]]:
    config = EngineConfig(
        model={"ref": str(path), "skip_tokenizer": True, "dtype": "float32", **model},
        platform={"name": platform, "threads": 1},
        cache={"num_blocks": 16},
    )
    async with Engine(config) as engine:
        prompt = [3, 17, 9, 4, 30, 22, 11]
        done = await engine.generate(prompt, SamplingParams(max_tokens=1, prompt_logprobs=0, seed=0))
        taken = engine._open_parts().executor._worker.measured()["weights"]  # type: ignore[attr-defined]
        assert taken == engine.resolved.memory.weights
        assert done.prompt_logprobs is not None
        logprobs = torch.tensor([entry.logprob for entry in done.prompt_logprobs if entry is not None])
        return logprobs, taken, tuple(notice for notice in engine.resolved.notices if "weights are expanded" in notice)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize(
    ("model", "name"), [("llama", n) for n in NAMES] + [("moe", n) for n in ("gptq-4-sym", "awq", "w8a8", "fp8")]
)
async def test_a_model_computes_with_them(tmp_path: Path, model: str, name: str) -> None:
    section, kind = SECTIONS[name]
    path = make_checkpoint(MOE if model == "moe" else LLAMA, tmp_path / "source")
    path = quantize_checkpoint(path, tmp_path / "quantized", section)
    expected, plain, _ = await prompt_logprobs(path / "plain", "reference")
    expanded, size, notices = await prompt_logprobs(path, "reference")
    assert torch.equal(expanded, expected) and size == plain and len(notices) == 1
    native, taken, notices = await prompt_logprobs(path, "cpu", expand_quantized=False)
    assert (native - expected).abs().max() < (1.0 if kind else 1e-3), "activations in int8, where weights are in blocks"
    if kind is None:
        assert taken == plain and "does not multiply" in notices[0]
    else:
        assert taken < 0.6 * plain and not notices


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_method_that_nobody_reads_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint(LLAMA, tmp_path / "source")
    path = quantize_checkpoint(path, tmp_path / "quantized", SECTIONS["fp8"][0])
    config = path / "config.json"
    config.write_text(config.read_text().replace('"quant_method": "fp8"', '"quant_method": "exotic"'))
    with pytest.raises(InferError, match=r"exotic.*no quantization plugin handles; installed are .*awq"):
        await prompt_logprobs(path, "reference")
