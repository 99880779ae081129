"""Random weights in the files of a checkpoint, made once a run on the device, nothing downloaded. Owns what it wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor

from gpu.place import Place
from infer.backends.reference.platform import OPS
from infer.config.engine import PluginsSection
from infer.layers.parameter import Layer, named_parameters
from infer.plugins import build_registry
from infer.testing.tiny_models import build_model, model_config


@dataclass(frozen=True, slots=True)
class RandomCheckpoint:
    """A directory, and the bytes of its weights by what they are for."""

    path: Path
    settings: dict[str, Any]
    expert_bytes: int
    embedding_bytes: int
    """Of which a step reads a row for each token."""
    other_bytes: int

    @property
    def num_layers(self) -> int:
        return int(self.settings["num_hidden_layers"])

    @property
    def layer_bytes(self) -> int:
        """Of one layer, the head counted to the layers."""
        return (self.expert_bytes + self.other_bytes) // self.num_layers

    @property
    def kv_bytes(self) -> int:
        """Of one token in a cache of the compute dtype."""
        settings = self.settings
        width = (
            settings["num_key_value_heads"] * settings["head_dim"] * getattr(torch, settings["torch_dtype"]).itemsize
        )
        return 2 * self.num_layers * int(width)


def dense(place: Place) -> RandomCheckpoint:
    return _written(place, "dense", place.sizes.dense)


def sparse(place: Place) -> RandomCheckpoint:
    return _written(place, "sparse", place.sizes.sparse)


def _written(place: Place, name: str, settings: dict[str, Any]) -> RandomCheckpoint:
    path = place.directory / name
    complete = path / "bytes.json"
    if not complete.is_file():
        path.mkdir(parents=True, exist_ok=True)
        sizes = {"expert_bytes": 0, "embedding_bytes": 0, "other_bytes": 0}
        tensors = dict(_tensors(place, settings))
        for tensor_name, tensor in tensors.items():
            kind = "expert" if ".experts." in tensor_name else "embedding" if "embed_tokens" in tensor_name else "other"
            sizes[f"{kind}_bytes"] += tensor.nbytes
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        (path / "config.json").write_text(json.dumps(settings))
        complete.write_text(json.dumps(sizes))
    return RandomCheckpoint(path, settings, **json.loads(complete.read_text()))


def _tensors(place: Place, settings: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that the architecture's weight table names; products keep the size of what they multiply."""
    registry = build_registry(PluginsSection(allow=()))
    [spec] = [s for s in registry.specs("model") if settings["architectures"][0] in s.architectures]
    quant = registry.create("quant_method", "unquantized", None)
    model = build_model(spec, model_config(settings), ops=OPS, quant=quant, device="meta")
    parameters = named_parameters(cast(Layer, model))
    dtype = getattr(torch, settings["torch_dtype"])
    generator = torch.Generator(place.device).manual_seed(0)
    for name, target in model.weight_table().targets.items():
        shape = target.stored_shape(parameters[target.path].shape)
        drawn = torch.randn(shape, generator=generator, device=place.device)
        if len(shape) == 1:
            drawn = 1 + drawn / 10 if "norm" in name else drawn / 10
        elif "embed_tokens" not in name:
            drawn /= shape[-1] ** 0.5
        yield name, drawn.to(dtype).cpu()
