"""Tiny random models beside their transformers twins, built once per test run. Owns the cache of both."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from infer.backends.reference.platform import OPS
from infer.models import gemma3, llama, qwen2, qwen3
from infer.plugins.model import CausalLM, ModelSpec
from infer.quantization.unquantized import UnquantizedMethod
from infer.testing.tiny_models import (
    DictCheckpoint,
    PagedDriver,
    build_model,
    model_config,
    random_transformers_model,
)
from infer.weights.loader import load_weights

SPECS: dict[str, ModelSpec] = {
    architecture: spec
    for module in (llama, qwen2, qwen3, gemma3)
    for spec in module.infer_models()
    for architecture in spec.architectures
}


@dataclass
class Twin:
    """One set of random weights, here and in transformers."""

    config: dict[str, Any]
    model: CausalLM
    oracle: Any

    def expected(self, ids: list[int], **options: Any) -> torch.Tensor:
        """transformers' logits at every position."""
        with torch.no_grad():
            logits: torch.Tensor = self.oracle(torch.tensor([ids]), **options).logits[0]
        return logits

    def driver(self, block_size: int = 4) -> PagedDriver:
        return PagedDriver(self.model, block_size)

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(3, self.config["vocab_size"], (length,), generator=generator).tolist()


def build(config: dict[str, Any], oracle: Any, **ops: Any) -> CausalLM:
    """Our model with the oracle's weights; keyword arguments replace entries of the ops table."""
    model = build_model(
        SPECS[config["architectures"][0]],
        model_config(config),
        ops=dataclasses.replace(OPS, **ops),
        quant=UnquantizedMethod(),
    )
    load_weights(model, DictCheckpoint(oracle.state_dict()))
    return model


@pytest.fixture(scope="session")
def twin() -> Callable[[dict[str, Any]], Twin]:
    known: dict[str, Twin] = {}

    def make(config: dict[str, Any]) -> Twin:
        key = json.dumps(config)
        if key not in known:
            oracle = random_transformers_model(config)
            known[key] = Twin(config, build(config, oracle), oracle)
        return known[key]

    return make
