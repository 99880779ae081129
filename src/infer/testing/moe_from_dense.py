"""A small mixture-of-experts checkpoint out of a dense one: real language and real routes without a large download.

For tests, examples and demos, on the calling thread; writes one directory and owns nothing.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from infer.config.engine import PluginsSection
from infer.config.env import read_environment
from infer.errors import UnsupportedModelError
from infer.plugins import Registry, build_registry
from infer.plugins.model_reference import resolve_reference
from infer.weights.facts import find_gguf, read_model_config
from infer.weights.opening import open_checkpoint

if TYPE_CHECKING:
    from infer.config.model import ModelConfig
    from infer.weights.checkpoint import Checkpoint

MLP = re.compile(r"(model\.layers\.(\d+))\.mlp\.(gate|up|down)_proj\.weight")
POST_NORM = "post_attention_layernorm.weight"
ROUTER_SPREAD = 2.0
"""Standard deviation of the router's logits for a normed random input: clear choices, no near-ties."""
SHARED_SIZE = 8
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
    *("chat_template.json", "generation_config.json"),
)
# What the dense architecture means by a key that its config.json does not have; the sparse one may mean something else.
SILENT: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"rms_norm_eps": 1e-6, "rope_theta": 10000.0},
    "Qwen3ForCausalLM": {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "num_key_value_heads": 32, "head_dim": 128},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How a sparse architecture names itself and its parts."""

    architecture: str
    model_type: str
    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: bool = False
    """It has an expert for every token, which becomes one that answers zero."""


MIXTRAL = Form(
    architecture="MixtralForCausalLM", model_type="mixtral", block="block_sparse_moe", gate="w1", up="w3", down="w2"
)
QWEN2_MOE = Form(architecture="Qwen2MoeForCausalLM", model_type="qwen2_moe", shared=True)
QWEN3_MOE = Form(architecture="Qwen3MoeForCausalLM", model_type="qwen3_moe")


def moe_from_dense(
    source: str | Path,
    target: Path,
    *,
    num_experts: int = 8,
    top_k: int = 2,
    sparse_step: int = 1,
    noise: float = 0.02,
    seed: int = 0,
) -> Path:
    """Write to `target` (which must not exist) a bf16 checkpoint with the tokenizer of `source`; returns `target`.

    `source` is a checkpoint directory or a GGUF, or as text any model reference. In every `sparse_step`-th layer the MLP
    becomes `num_experts` copies of itself plus Gaussian noise of `noise` times each matrix's standard deviation, behind
    a random router whose weights add up to one: without noise the model computes what the dense one does. Nobody
    trained the router: routes depend on the token, but some experts are far more popular than others. A Llama becomes
    a Mixtral, or a Qwen2-MoE when some layers stay dense; a Qwen3 becomes a Qwen3-MoE. Raises `UnsupportedModelError`
    for others.
    """
    registry = build_registry(PluginsSection(allow=()))
    source = _fetched(source, registry) if isinstance(source, str) else source
    specs = registry.specs("model")
    config = read_model_config(source, "dense", specs)
    form = _form(config, sparse_step)
    target.mkdir(parents=True)
    checkpoint = open_checkpoint(config, specs)
    try:
        draw = torch.Generator().manual_seed(seed)
        tensors = dict(_tensors(checkpoint, config, form, num_experts, sparse_step, noise, draw))
    finally:
        checkpoint.close()
    settings = _settings(config, form) | {
        "num_experts_per_tok": top_k,
        "num_local_experts" if form is MIXTRAL else "num_experts": num_experts,
        "decoder_sparse_step": sparse_step,
    }
    (target / "config.json").write_text(json.dumps(settings, indent=2))
    from safetensors.torch import save_file  # noqa: PLC0415 - a test dependency

    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    _carry_tokenizer(registry, source, target)
    return target


def _fetched(reference: str, registry: Registry) -> Path:
    """Where a model reference lies on this disk, as for an engine of this process."""
    mine = read_environment()
    found = resolve_reference(
        reference,
        registry,
        mine.cache_dir,
        offline=mine.offline,
        token=mine.hub_token,
        progress=lambda report: None,
    )
    return found.path


def _form(config: ModelConfig, sparse_step: int) -> Form:
    name, raw = config.architecture, config.raw
    biased = [key for key in ("attention_bias", "mlp_bias", "use_sliding_window") if raw.get(key)]
    if name not in SILENT or biased:
        what = f"{name} with {biased[0]}" if biased else name
        raise UnsupportedModelError(f"{what} cannot be made sparse; plain {' and '.join(SILENT)} can")
    if name == "Qwen3ForCausalLM":
        return QWEN3_MOE
    return MIXTRAL if sparse_step == 1 else QWEN2_MOE


def _settings(config: ModelConfig, form: Form) -> dict[str, Any]:
    raw = {key: value for key, value in config.raw.items() if value is not None}
    settings = SILENT[config.architecture] | {"num_key_value_heads": raw["num_attention_heads"]} | raw
    if config.architecture == "Qwen3ForCausalLM":
        settings["num_key_value_heads"] = raw.get("num_key_value_heads", 32)
    settings |= {
        "architectures": [form.architecture],
        "model_type": form.model_type,
        "torch_dtype": "bfloat16",
        "moe_intermediate_size": raw["intermediate_size"],
        "norm_topk_prob": True,
        "sliding_window": None,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
    }
    if form.shared:
        settings |= {"qkv_bias": False, "shared_expert_intermediate_size": SHARED_SIZE}
    settings.pop("dtype", None)
    return settings


def _tensors(
    checkpoint: Checkpoint,
    config: ModelConfig,
    form: Form,
    num_experts: int,
    sparse_step: int,
    noise: float,
    draw: torch.Generator,
) -> Iterator[tuple[str, Tensor]]:
    for name in sorted(checkpoint.tensors()):
        if name == "lm_head.weight" and config.raw.get("tie_word_embeddings"):
            continue
        weight = checkpoint.read(name, torch.float32)
        found = MLP.fullmatch(name)
        sparse = found is not None and (int(found[2]) + 1) % sparse_step == 0
        if found is None or not sparse:
            yield name, weight.bfloat16()
            continue
        block = f"{found[1]}.{form.block}"
        part = {"gate": form.gate, "up": form.up, "down": form.down}[found[3]]
        for expert in range(num_experts):
            other = torch.randn(weight.shape, generator=draw).mul_(noise * weight.std()).add_(weight)
            yield f"{block}.experts.{expert}.{part}.weight", other.bfloat16()
        if found[3] == "gate":
            norm = checkpoint.read(f"{found[1]}.{POST_NORM}", torch.float32)
            yield f"{block}.gate.weight", _router(norm, num_experts, draw).bfloat16()
            if form.shared:
                yield from _silent_expert(block, weight.shape[1])


def _router(norm: Tensor, num_experts: int, draw: torch.Generator) -> Tensor:
    """Random directions, divided by the norm's weight: no few large channels decide for every token alike."""
    floor = norm.abs().median() / 4
    columns = norm.sign() * norm.abs().clamp_min(floor)
    spread = ROUTER_SPREAD / norm.numel() ** 0.5
    return torch.randn(num_experts, norm.numel(), generator=draw).mul_(spread).div_(columns)


def _silent_expert(block: str, hidden: int) -> Iterator[tuple[str, Tensor]]:
    shapes = {"gate_proj": (SHARED_SIZE, hidden), "up_proj": (SHARED_SIZE, hidden), "down_proj": (hidden, SHARED_SIZE)}
    for part, shape in shapes.items():
        yield f"{block}.shared_expert.{part}.weight", torch.zeros(shape, dtype=torch.bfloat16)
    yield f"{block}.shared_expert_gate.weight", torch.zeros(1, hidden, dtype=torch.bfloat16)


def _carry_tokenizer(registry: Registry, source: Path, target: Path) -> None:
    gguf = find_gguf(source)
    if gguf is None:
        for name in TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, target / name)
        return
    tokenizer = registry.create("tokenizer", "gguf", gguf)
    tokenizer._backend.save(str(target / "tokenizer.json"))
    settings = dict(tokenizer.special_tokens()) | {"chat_template": tokenizer.chat_template}
    (target / "tokenizer_config.json").write_text(json.dumps(settings))
