"""Planted bugs: the kit of models names the promise that a wrong one breaks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from infer.plugins import Registry
from infer.testing.kits import model
from planted_bugs import PlantBug, failures, plant_bug, registry

__all__ = ["plant_bug", "registry"]


def _relative_positions(made: Any) -> None:
    forward = made.forward

    def wrong(batch: Any) -> Any:
        batch.positions = batch.positions - batch.positions.min()
        return forward(batch)

    made.forward = wrong


def _sees_neighbours(made: Any) -> None:
    forward = made.forward
    made.forward = lambda batch: forward(batch) + 0.1 * forward(batch).mean(0)


def _forgets_a_layer(made: Any) -> None:
    layout = made.kv_layout()
    made.kv_layout = lambda: msgspec.structs.replace(layout, layers=layout.layers[:1])


def _forgets_a_weight(made: Any) -> None:
    del made.weight_table().targets["model.norm.weight"]


def _half_logits(made: Any) -> None:
    logits = made.logits
    made.logits = lambda hidden, rows: logits(hidden, rows).half()


@pytest.mark.row("X-PLUGIN-KIT", "the kit fails six planted plugin bugs")
@pytest.mark.parametrize(
    ("bug", "broken"),
    [
        (_relative_positions, {"chunks"}),
        (_sees_neighbours, {"chunks", "batch"}),
        (_half_logits, {"chunks"}),
        (_forgets_a_layer, {"kv_layout", "chunks", "batch"}),
        (_forgets_a_weight, {"weights", "chunks", "batch"}),
    ],
)
def test_model(plant_bug: PlantBug, registry: Registry, bug: Callable[[Any], None], broken: set[str]) -> None:
    factory = registry.load("model", "llama")

    def make(config: Any, context: Any) -> Any:
        made = factory(config, context)
        bug(made)
        return made

    spec = dataclasses.replace(registry.get("model", "llama"), factory=plant_bug(make))
    ops = registry.create("platform", "reference", threads=1).ops
    plain = registry.create("quant_method", "unquantized", None)
    assert failures(model.checks(spec, ops, plain)) - {"hidden_taps", "route_taps"} == broken


def _one_layer_off(made: Any) -> None:
    original = made.set_hidden_taps
    made.set_hidden_taps = lambda taps: original(
        {1 - layer: rows for layer, rows in taps.items()} if len(taps) == 1 else taps
    )


def _forgets_to_stop(made: Any) -> None:
    original, all_taps = made.set_hidden_taps, {}

    def keep(taps: Any) -> None:
        all_taps.update({layer: rows for layer, rows in taps.items() if layer not in all_taps})
        original(all_taps)

    made.set_hidden_taps = keep


def _writes_nothing(made: Any) -> None:
    made.set_hidden_taps = lambda taps: None


def _writes_every_row(made: Any) -> None:
    original = made.set_hidden_taps

    def fill(taps: Any) -> None:
        for rows in taps.values():
            rows.zero_()
        original(taps)

    made.set_hidden_taps = fill


def _wrong_shape(made: Any) -> None:
    layers, size = made.hidden_shape()
    made.hidden_shape = lambda: (layers + 1, size)


@pytest.mark.parametrize("bug", [_one_layer_off, _forgets_to_stop, _writes_nothing, _writes_every_row, _wrong_shape])
def test_hidden_taps(plant_bug: PlantBug, registry: Registry, bug: Callable[[Any], None]) -> None:
    assert _failed(plant_bug, registry, "llama", bug) == {"hidden_taps"}


def _no_route_taps(made: Any) -> None:
    made.set_route_taps = lambda taps: None


def _routes_are_not_taken_away(made: Any) -> None:
    original = made.set_route_taps
    made.set_route_taps = lambda taps: original(taps) if taps else None


def _more_experts_than_it_says(made: Any) -> None:
    layers = made.routed_layers()
    made.routed_layers = lambda: tuple(msgspec.structs.replace(layer, num_experts=layer.top_k) for layer in layers)


def _routes_backwards(made: Any) -> None:
    layers = made.routed_layers()
    made.routed_layers = lambda: layers[::-1]


@pytest.mark.parametrize(
    "bug", [_no_route_taps, _routes_are_not_taken_away, _more_experts_than_it_says, _routes_backwards]
)
def test_route_taps(plant_bug: PlantBug, registry: Registry, bug: Callable[[Any], None]) -> None:
    assert _failed(plant_bug, registry, "qwen3_moe", bug) == {"route_taps"}


def _failed(plant_bug: PlantBug, registry: Registry, name: str, bug: Callable[[Any], None]) -> set[str]:
    factory = registry.load("model", name)

    def make(config: Any, context: Any) -> Any:
        made = factory(config, context)
        bug(made)
        return made

    spec = dataclasses.replace(registry.get("model", name), factory=plant_bug(make))
    ops = registry.create("platform", "reference", threads=1).ops
    plain = registry.create("quant_method", "unquantized", None)
    return failures(check for check in model.checks(spec, ops, plain) if check.name.endswith("taps"))


def test_model_that_raises_what_python_raises(plant_bug: PlantBug, registry: Registry) -> None:
    def view(config: Any) -> Any:
        return int(config.raw["hidden_size"]) // config.raw["num_attention_heads"] // config.raw["num_hidden_layers"]

    spec = dataclasses.replace(registry.get("model", "llama"), config_view=plant_bug(view, "view"))
    ops = registry.create("platform", "reference", threads=1).ops
    plain = registry.create("quant_method", "unquantized", None)
    assert failures(model.checks(spec, ops, plain)) == {"typed_errors_for_bad_facts"}


def test_model_whose_gguf_lacks_a_tensor(registry: Registry) -> None:
    spec = registry.get("model", "llama")
    assert spec.gguf is not None
    tensors = {name: hf for name, hf in spec.gguf.tensors.items() if name != "output_norm.weight"}
    broken = dataclasses.replace(spec, gguf=dataclasses.replace(spec.gguf, tensors=tensors))
    ops = registry.create("platform", "reference", threads=1).ops
    plain = registry.create("quant_method", "unquantized", None)
    assert failures(model.checks(broken, ops, plain)) == {"gguf_names_every_weight"}
