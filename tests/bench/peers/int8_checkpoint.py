"""A checkpoint in int8 for vLLM (compressed-tensors "int-quantized": weights per output channel, activations per token).

Rounding to the nearest; embedding and head stay in bf16, as vLLM's own int8 examples leave them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

WEIGHTS = {
    "num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "group_size": None, "dynamic": False,
    "observer": "minmax", "actorder": None, "block_structure": None, "observer_kwargs": {},
}  # fmt: skip
ACTIVATIONS = {**WEIGHTS, "strategy": "token", "dynamic": True, "observer": None}


def write_w8a8(source: Path, target: Path) -> bool:
    """Read a bf16 directory, write `target` beside it."""
    target.mkdir()
    for path in source.iterdir():
        if path.name not in ("model.safetensors", "config.json"):
            shutil.copy(path, target)
    tensors = {}
    for name, value in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = value
            continue
        scale = (value.float().abs().amax(1, keepdim=True) / 127).clamp(min=1e-8)
        tensors[name] = (value.float() / scale).round().clamp(-128, 127).to(torch.int8)
        tensors[f"{name.removesuffix('weight')}weight_scale"] = scale.to(torch.bfloat16)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    group: dict[str, Any] = {
        "targets": ["Linear"], "weights": WEIGHTS, "input_activations": ACTIVATIONS, "output_activations": None,
    }  # fmt: skip
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
        "ignore": ["lm_head"], "kv_cache_scheme": None, "config_groups": {"group_0": group},
    }  # fmt: skip
    (target / "config.json").write_text(json.dumps(config, indent=1))
    return True
