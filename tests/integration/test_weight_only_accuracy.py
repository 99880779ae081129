"""What int8 and int4 weights cost the real small model: the divergence of its next-token distributions from those of 16 bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from infer.backends.cpu.build import build_library
from infer.backends.cpu.library import Library
from infer.backends.cpu.ops import make_kernels, make_ops
from infer.config.engine import PluginsSection
from infer.config.model import ModelConfig
from infer.plugins import build_registry
from infer.quantization.unquantized import UnquantizedMethod
from infer.quantization.weight_only import WeightOnlyMethod, create_int4, create_int8
from infer.testing.tiny_models import DictCheckpoint, PagedDriver, build_model
from infer.weights.at_load import quantize_at_load
from infer.weights.facts import read_model_config
from infer.weights.loader import load_weights
from infer.weights.opening import open_checkpoint

TEXT = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text("utf-8")
TOKENS = 384

pytestmark = pytest.mark.model


def off_the_grid(weights: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The same function with other numbers. The file's weights lie on a grid of 4 bits, which 4 bits would hit again; here
    every channel between two matrices, or between a norm and a matrix, is scaled at random, and back behind it."""
    draw = torch.Generator().manual_seed(0)

    def factors(count: int) -> Tensor:
        return torch.exp2(torch.rand(count, generator=draw) - 0.5)

    heads, kv_heads = config.raw["num_attention_heads"], config.raw["num_key_value_heads"]
    out = {name: tensor.clone() for name, tensor in weights.items()}
    for i in range(config.raw["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        for norm, parts in (
            ("input_layernorm", [f"self_attn.{part}_proj" for part in "qkv"]),
            ("post_attention_layernorm", ["mlp.gate_proj", "mlp.up_proj"]),
        ):
            scale = factors(len(out[f"{layer}{norm}.weight"]))
            out[f"{layer}{norm}.weight"] *= scale
            for part in parts:
                out[f"{layer}{part}.weight"] /= scale
        scale = factors(len(out[f"{layer}mlp.up_proj.weight"]))
        out[f"{layer}mlp.up_proj.weight"] *= scale[:, None]
        out[f"{layer}mlp.down_proj.weight"] /= scale
        scale = factors(len(out[f"{layer}self_attn.v_proj.weight"]))
        out[f"{layer}self_attn.v_proj.weight"] *= scale[:, None]
        by_head = scale.view(kv_heads, 1, -1).expand(-1, heads // kv_heads, -1)
        out[f"{layer}self_attn.o_proj.weight"] /= by_head.reshape(-1)
    return {name: tensor.bfloat16() for name, tensor in out.items()}


@pytest.mark.parametrize(
    ("method", "divergence", "agreement"), [(create_int8(None), 0.02, 0.9), (create_int4(None), 0.4, 0.6)]
)
def test_distributions_stay_close(
    smollm2_gguf: Path, kernel_cache: Path, method: WeightOnlyMethod, divergence: float, agreement: float
) -> None:
    registry = build_registry(PluginsSection(allow=()))
    specs = registry.specs("model")
    config = read_model_config(smollm2_gguf, "smollm2", specs)
    (spec,) = (spec for spec in specs if config.architecture in spec.architectures)
    checkpoint = open_checkpoint(config, specs)
    weights = off_the_grid({name: checkpoint.read(name, torch.float32) for name in checkpoint.tensors()}, config)
    checkpoint.close()
    tokenizer = registry.create("tokenizer", "gguf", smollm2_gguf)
    ids = tokenizer.encode(TEXT[:4000])[:TOKENS]
    library = Library(build_library(kernel_cache), 2)
    try:
        ops, logits = make_ops(*make_kernels(library)), []
        for chosen in (None, method):
            model = build_model(spec, config, ops=ops, quant=UnquantizedMethod(), dtype=torch.bfloat16)
            if chosen is not None:
                made = quantize_at_load(model, chosen, ops.blocks, torch.bfloat16)
                assert made.in_blocks and not made.left and not made.expanded
            with torch.inference_mode():
                load_weights(model, DictCheckpoint(weights))
                driver = PagedDriver(model, block_size=16, dtype=torch.bfloat16)
                logits.append(driver.step([("a", ids)])[0].double())
    finally:
        library.close()
    plain, quantised = (values.log_softmax(-1) for values in logits)
    lost = (plain.exp() * (plain - quantised)).sum(-1)
    same = (plain.argmax(-1) == quantised.argmax(-1)).double().mean()
    surprise = -plain[:-1].gather(1, torch.tensor(ids[1:])[:, None]).mean()
    print(
        f"{method.name}: KL mean {lost.mean():.5f}, worst {lost.max():.4f}, same best token {same:.3f}, text {surprise:.2f}"
    )
    assert surprise < 5, "the twin reads the text as the model does"
    assert lost.mean() < divergence and same > agreement
