"""Part: every architecture, two random layers of it, says the same on this device however a prompt is cut (the kit of models)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch

from gpu.checks import Check, Facts
from gpu.place import Place
from gpu.tables import cuda_tables
from infer.backends.reference.platform import OPS
from infer.config.engine import PluginsSection
from infer.layers.parameter import Layer, named_parameters
from infer.plugins import Registry, build_registry
from infer.plugins.platform import Ops
from infer.testing.kits import Check as KitCheck
from infer.testing.kits import model as kit
from infer.testing.tiny_models import DictCheckpoint, PagedDriver, build_model, model_config
from infer.weights.loader import load_weights

NEAR_TIE = 1e-3
"""Logits closer than this may swap places between two correct fp32 programs."""

DEVICE_CHECKS = ("chunks", "batch", "hidden_taps", "route_taps")
"""The others touch no device and are part of `make test`."""


def checks(place: Place) -> Iterator[Check]:
    """In fp32, where the kit's tolerance is tight. A dry run takes three architectures."""
    registry = build_registry(PluginsSection(allow=()))
    quant = registry.create("quant_method", "unquantized", None)
    ops = OPS if place.dry_run else cuda_tables(place)["plain"]
    yield Check("sliding window: tokens of the CPU reference", lambda: windowed(place, registry, ops))
    specs = registry.specs("model")
    if place.dry_run:
        specs = tuple(spec for spec in specs if spec.name in ("llama", "gemma3", "qwen2_moe"))
    for spec in specs:
        for check in kit.checks(spec, ops, quant, device=str(place.device)):
            if check.name in DEVICE_CHECKS:
                yield Check(f"{spec.name} {check.name}", lambda check=check: run(place, check))  # type: ignore[misc]


def run(place: Place, check: KitCheck) -> Facts | None:
    check.run()
    place.synchronize()
    return None


def windowed(place: Place, registry: Registry, ops: Ops) -> Facts:
    """A random Mistral in fp32, greedy far beyond its window, on this device and with the reference on the CPU."""
    [spec] = [spec for spec in registry.specs("model") if spec.name == "mistral"]
    quant = registry.create("quant_method", "unquantized", None)
    found = []
    for table, device in ((OPS, "cpu"), (ops, str(place.device))):
        model = build_model(spec, model_config(spec.example), ops=table, quant=quant, device=device)
        parameters = named_parameters(cast(Layer, model))
        generator = torch.Generator().manual_seed(0)
        load_weights(
            model,
            DictCheckpoint(
                {
                    name: torch.randn(target.stored_shape(parameters[target.path].shape), generator=generator) * 0.3
                    for name, target in model.weight_table().targets.items()
                }
            ),
        )
        found.append(greedy(PagedDriver(model, device=device), 5 * spec.example["sliding_window"]))
    (tokens, gaps), (others, _) = found
    for at, (one, other, gap) in enumerate(zip(tokens, others, gaps, strict=True)):
        if one != other:
            assert gap < NEAR_TIE, f"token {at}: {other}, the reference has {one} and no other within {gap:.4f}"
            return {"tokens": at}
    return {"tokens": len(tokens)}


def greedy(driver: PagedDriver, count: int) -> tuple[list[int], list[float]]:
    """-> tokens, and how far the second best logit was from the best."""
    tokens, gaps, fed = [], [], [1, 5, 9]
    for _ in range(count):
        best = driver.step([("a", fed)])[0][-1].topk(2)
        tokens.append(int(best.indices[0]))
        gaps.append(float(best.values[0] - best.values[1]))
        fed = tokens[-1:]
    return tokens, gaps
