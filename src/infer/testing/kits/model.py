"""Conformance of a model: plans on meta, states its weights and its KV, and says the same however a prompt is cut.

Builds the spec's two-layer example with random weights, on the calling thread; owns the small model while it checks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import msgspec
import torch
from torch import Tensor

from infer.errors import ModelError
from infer.layers.parameter import Layer, named_layers, named_parameters
from infer.plugins.model import CausalLM, ModelSpec
from infer.testing.kits import Check, expect, load
from infer.testing.kits._model_taps import check_hidden, check_routes
from infer.testing.tiny_models import DictCheckpoint, PagedDriver, build_model, model_config
from infer.weights.loader import load_weights

if TYPE_CHECKING:
    from infer.plugins.platform import Ops
    from infer.plugins.quant_method import QuantMethod

PROMPT_LENGTH = 40
"""Longer than the examples' sliding windows."""
TOLERANCE = 2e-4


def checks(spec: ModelSpec, ops: Ops, quant: QuantMethod, device: str = "cpu") -> Iterator[Check]:
    """`ops` and `quant` are a correct platform's and method's, usually the reference's and the unquantized one; `device` is
    where these ops compute, which is in fp32 here."""
    for planned in (_meta, _weights, _kv_layout):
        yield Check(planned.__name__.strip("_"), partial(planned, spec, ops, quant))
    for body in (_chunks, _batch, _hidden_taps, _route_taps):
        yield Check(body.__name__.strip("_"), partial(body, spec, ops, quant, device))
    yield Check("typed_errors_for_bad_facts", partial(_bad_facts, spec))
    if spec.gguf is not None:
        yield Check("gguf_names_every_weight", partial(_gguf, spec, ops, quant))


def _plan(spec: ModelSpec, ops: Ops, quant: QuantMethod) -> CausalLM:
    return build_model(spec, model_config(spec.example), ops=ops, quant=quant, device="meta")


def _random(spec: ModelSpec, ops: Ops, quant: QuantMethod, device: str) -> CausalLM:
    model = build_model(spec, model_config(spec.example), ops=ops, quant=quant, device=device)
    generator = torch.Generator().manual_seed(0)
    shapes = _source_shapes(model)
    load_weights(model, DictCheckpoint({n: torch.randn(s, generator=generator) * 0.3 for n, s in shapes.items()}))
    return model


def _source_shapes(model: CausalLM) -> dict[str, tuple[int, ...]]:
    """Checkpoint tensor -> shape, as the weight table implies."""
    parameters = named_parameters(cast(Layer, model))
    shapes = {}
    for name, target in model.weight_table().targets.items():
        expect(target.path in parameters, f"tensor {name!r} goes to {target.path}, which the model does not have")
        shapes[name] = target.stored_shape(parameters[target.path].shape)
    return shapes


def _meta(spec: ModelSpec, ops: Ops, quant: QuantMethod) -> None:
    """Planning costs no memory. (Small tables that are computed, not loaded, may be real.)"""
    model = _plan(spec, ops, quant)
    parameters = named_parameters(cast(Layer, model))
    expect(parameters, "the model has no parameters")
    real = [path for path, parameter in parameters.items() if parameter.data.device.type != "meta"]
    expect(not real, f"built on meta, yet these hold memory: {real[:3]}")
    expect(spec.example["architectures"][0] in spec.architectures, "the example is of another architecture")
    expect(spec.example["num_hidden_layers"] == 2, "the example must have two layers")


def _weights(spec: ModelSpec, ops: Ops, quant: QuantMethod) -> None:
    """Every row of every parameter has one source."""
    model = _plan(spec, ops, quant)
    parameters = {path: item.shape for path, item in named_parameters(cast(Layer, model)).items()}
    model.weight_table().check(_source_shapes(model), parameters)
    expect(len(list(named_layers(cast(Layer, model)))) > 2, "the model is not made of layers")


def _kv_layout(spec: ModelSpec, ops: Ops, quant: QuantMethod) -> None:
    layout = _plan(spec, ops, quant).kv_layout()
    layers = [layer.layer_id for layer in layout.layers]
    grouped = [layer_id for group in layout.groups for layer_id in group.layer_ids]
    expect(len(set(layers)) == len(layers), f"layer ids {layers} repeat")
    expect(sorted(grouped) == sorted(layers), f"groups hold layers {sorted(grouped)}, the layout {sorted(layers)}")
    expect(len({group.name for group in layout.groups}) == len(layout.groups), "group names repeat")
    for layer in layout.layers:
        expect(layer.num_kv_heads > 0 and min(layer.head_sizes) > 0, f"layer {layer.layer_id} has an empty cache")
    for group in layout.groups:
        expect(group.window is None or group.window > 0, f"group {group.name} has window {group.window}")


def _prompt(spec: ModelSpec, seed: int, length: int = PROMPT_LENGTH) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(0, spec.example["vocab_size"], (length,), generator=generator).tolist()
    return ids


def _whole(model: CausalLM, prompt: list[int], device: str) -> Tensor:
    return PagedDriver(model, device=device).step([("a", prompt)])[0]


def _chunks(spec: ModelSpec, ops: Ops, quant: QuantMethod, device: str) -> None:
    """A prompt in chunks, its end token by token, gives the logits of the whole."""
    model, prompt = _random(spec, ops, quant, device), _prompt(spec, 1)
    whole, driver = _whole(model, prompt, device), PagedDriver(model, device=device)
    expect(tuple(whole.shape) == (PROMPT_LENGTH, spec.example["vocab_size"]), f"logits of shape {tuple(whole.shape)}")
    expect(whole.dtype == torch.float32 and bool(whole.isfinite().all()), "logits are not finite float32")
    cuts = [0, 7, 8, 20, 33, *range(34, PROMPT_LENGTH + 1)]
    pieces = [driver.step([("a", prompt[a:b])])[0] for a, b in itertools.pairwise(cuts)]
    _close(torch.cat(pieces), whole, "a prompt in chunks and one that is whole disagree")


def _batch(spec: ModelSpec, ops: Ops, quant: QuantMethod, device: str) -> None:
    """Requests in one batch do not see each other."""
    model = _random(spec, ops, quant, device)
    prompts = {
        name: _prompt(spec, seed, length) for seed, (name, length) in enumerate((("a", 40), ("b", 1), ("c", 13)))
    }
    driver = PagedDriver(model, device=device)
    driver.step([("a", prompts["a"][:20])])
    together = driver.step([("a", prompts["a"][20:]), ("b", prompts["b"]), ("c", prompts["c"])])
    for name, logits in zip(prompts, together, strict=True):
        alone = _whole(model, prompts[name], device)
        _close(logits, alone[-len(logits) :], f"request {name!r} alone and in a batch disagree")


def _hidden_taps(spec: ModelSpec, ops: Ops, quant: QuantMethod, device: str) -> None:
    check_hidden(_random(spec, ops, quant, device), spec.example, _prompt(spec, 2), device)


def _route_taps(spec: ModelSpec, ops: Ops, quant: QuantMethod, device: str) -> None:
    check_routes(_random(spec, ops, quant, device), _prompt(spec, 2), device)


def _close(found: Tensor, expected: Tensor, message: str) -> None:
    error = ((found - expected).abs().max() / expected.abs().max()).item()
    expect(error <= TOLERANCE, f"{message} by {error:.2e} of the largest logit")


def _bad_facts(spec: ModelSpec) -> None:
    """A damaged config.json is a typed error that an operator can read, not a traceback."""
    view = load(spec, "config_view")
    view(model_config(spec.example))
    for key, value in (("hidden_size", "many"), ("num_attention_heads", 0), ("num_hidden_layers", None)):
        raw: dict[str, Any] = dict(spec.example) | {key: value}
        try:
            view(msgspec.structs.replace(model_config(spec.example), raw=raw))
        except ModelError as error:
            expect(key in str(error), f"the error does not name {key!r}: {error}")
        else:
            raise AssertionError(f"config_view accepts {key}={value!r}")


def _gguf(spec: ModelSpec, ops: Ops, quant: QuantMethod) -> None:
    """Every tensor of the example has a GGUF name (a tied head needs none), and every name is meant for something."""
    names = spec.gguf
    if names is None:
        return
    expect(names.architecture in spec.architectures, f"gguf.architecture {names.architecture!r} is not its own")
    table = _plan(spec, ops, quant).weight_table()
    experts = spec.example.get("num_experts") or spec.example.get("num_local_experts") or 1
    translated = {
        hf.replace("{i}", str(i)).replace("{e}", str(e))
        for hf in names.tensors.values()
        for i in range(2)
        for e in range(experts if "{e}" in hf else 1)
    }
    missing = sorted(set(table.targets) - translated)
    expect(not missing, f"no GGUF name for {missing[:3]}")
    keys = set(names.config_keys) | set(names.fixed)
    unknown = sorted(set(names.permuted.values()) - keys)
    expect(not unknown, f"gguf.permuted names config keys {unknown} that gguf.config_keys does not fill")
