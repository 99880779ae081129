"""Checks of the sparse part: the shared expert beside the routed ones, on a stream of its own, and after them: bits and time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from gpu.checkpoints import RandomCheckpoint
from gpu.checks import Check, Facts
from gpu.figures import figure
from gpu.place import Place
from infer.config.engine import PluginsSection
from infer.layers.moe import SparseMoE
from infer.layers.parameter import Layer, named_layers
from infer.plugins import build_registry
from infer.plugins.platform import Ops, Platform, SupportsGraphs
from infer.testing.tiny_models import build_model
from infer.weights.facts import read_model_config
from infer.weights.loader import load_weights
from infer.weights.opening import open_checkpoint

BATCHES = (1, 4, 16)


class Layers:
    """The sparse layers of one model, twice: with the platform's operations, and without the second stream."""

    def __init__(self, place: Place, checkpoint: Callable[[], RandomCheckpoint]) -> None:
        self.place = place
        self._make_checkpoint = checkpoint

    @cached_property
    def platform(self) -> Platform:
        made: Platform = build_registry(PluginsSection(allow=())).create("platform", self.place.platform)
        return made

    @cached_property
    def beside(self) -> list[SparseMoE]:
        return self._layers(self.platform.ops)

    @cached_property
    def after(self) -> list[SparseMoE]:
        return self._layers(replace(self.platform.ops, beside=None))

    def _layers(self, ops: Ops) -> list[SparseMoE]:
        registry = build_registry(PluginsSection(allow=()))
        specs = registry.specs("model")
        config = read_model_config(self._make_checkpoint().path, "random", specs)
        [spec] = [s for s in specs if config.architecture in s.architectures]
        quant = registry.create("quant_method", "unquantized", None)
        device = str(self.platform.device)
        model = build_model(spec, config, ops=ops, quant=quant, dtype=self.place.dtype, device=device)
        opened = open_checkpoint(config, specs)
        try:
            with torch.no_grad():
                load_weights(model, opened)
        finally:
            opened.close()
        return [layer for _, layer in named_layers(cast(Layer, model)) if isinstance(layer, SparseMoE)]

    def input(self, rows: int) -> Tensor:
        generator = torch.Generator().manual_seed(rows)
        width = self._make_checkpoint().settings["hidden_size"]
        return torch.randn(rows, width, generator=generator).to(self.platform.device, self.place.dtype)


def checks(place: Place, checkpoint: Callable[[], RandomCheckpoint]) -> Iterator[Check]:
    layers = Layers(place, checkpoint)
    yield Check("shared expert beside = after, to the bit", lambda: same(layers))
    yield Check("shared expert beside: time of a step of 16", lambda: faster(layers))


def through(layers: list[SparseMoE], x: Tensor) -> Tensor:
    """As a model does it: each layer adds to what comes in."""
    for layer in layers:
        x = x + layer(x) / len(layers)
    return x


def recorded(layers: Layers, which: list[SparseMoE], x: Tensor) -> Callable[[], Any]:
    """A replay of one layer after the other; the work itself where the platform records nothing."""
    platform = layers.platform

    def work() -> Tensor:
        return through(which, x)

    graph = platform.record(work)[1] if isinstance(platform, SupportsGraphs) else None
    return work if graph is None else graph.replay


def same(layers: Layers) -> Facts:
    """Eager, and replayed several times."""
    platform, place = layers.platform, layers.place
    assert place.dry_run or platform.ops.beside is not None, "the platform has no second stream"
    with platform.step_context():
        for rows in BATCHES:
            x = layers.input(rows)
            expected = through(layers.after, x).clone()
            assert torch.equal(through(layers.beside, x), expected), f"{rows} rows, eager"
            replay = recorded(layers, layers.beside, x)
            for turn in range(3):
                assert torch.equal(replay(), expected), f"{rows} rows, replay {turn}"
        platform.synchronize()
    return {"batches": list(BATCHES), "layers": len(layers.beside)}


def faster(layers: Layers) -> Facts:
    """Both replayed; the time falls."""
    place = layers.place
    with layers.platform.step_context():
        x = layers.input(BATCHES[-1])
        after, beside = (place.clock.seconds(recorded(layers, which, x)) for which in (layers.after, layers.beside))
    if not place.dry_run:
        assert beside < after, f"{beside * 1e6:.0f} us beside, {after * 1e6:.0f} us after"
    return figure(after / beside, "times", seconds_beside=beside, seconds_after=after)
