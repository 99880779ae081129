"""Which layers of a model route tokens to experts. Declared by the model, or read from its config.json and cross-checked.

Pure; fails closed on anything ambiguous. Owns nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infer.config.model import RoutedLayer
from infer.errors import ConfigError

MAX_LAYERS = 65_536
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k")
_LAYERS = ("num_hidden_layers", "n_layer")


@dataclass(frozen=True, slots=True)
class RouterLayout:
    """The routers of a model, in layer order."""

    router_ids: tuple[int, ...]
    """0-based decoder layers."""
    num_experts: int
    top_k: int

    @property
    def num_routers(self) -> int:
        return len(self.router_ids)

    @property
    def expert_counts(self) -> tuple[int, ...]:
        return (self.num_experts,) * len(self.router_ids)


def declared_layout(layers: Iterable[RoutedLayer]) -> RouterLayout:
    """What the model says of itself. Raises `ConfigError` when its routers are of different sizes."""
    routed = sorted(layers, key=lambda layer: layer.layer_id)
    sizes = {(layer.num_experts, layer.top_k) for layer in routed}
    ids = tuple(layer.layer_id for layer in routed)
    if len(sizes) != 1 or len(set(ids)) != len(ids):
        raise _refuse(f"it declares routers on layers {ids[:8]} of {len(sizes)} different sizes; one size is needed")
    ((experts, top_k),) = sizes
    return RouterLayout(ids, experts, top_k)


def derived_layout(configs: Sequence[Mapping[str, Any]]) -> RouterLayout:
    """Read from every place that states it (config.json, its text_config, ...). Raises `ConfigError` on a disagreement."""
    experts = _positive(configs, _EXPERTS)
    top_k = _positive(configs, _TOP_K)
    layers = _positive(configs, _LAYERS, MAX_LAYERS)
    first = _value(configs, ("first_k_dense_replace",))
    first = 0 if first is None else _integer(first, "first_k_dense_replace", 0, layers)
    formulas = []
    frequency = _value(configs, ("moe_layer_freq",))
    if isinstance(frequency, list | tuple):
        if len(frequency) != layers or any(entry not in (0, 1) for entry in frequency):
            raise _refuse(f"moe_layer_freq must have {layers} entries of 0 or 1")
        formulas.append(tuple(index for index, entry in enumerate(frequency) if entry))
    elif frequency is not None:
        every = _integer(frequency, "moe_layer_freq", 1, MAX_LAYERS)
        formulas.append(tuple(layer for layer in range(first, layers) if layer % every == 0))
    step = _value(configs, ("decoder_sparse_step",))
    if step is not None:
        every = _integer(step, "decoder_sparse_step", 1, MAX_LAYERS)
        dense = _value(configs, ("mlp_only_layers",)) or ()
        formulas.append(tuple(n for n in range(first, layers) if (n + 1) % every == 0 and n not in dense))
    formulas = formulas or [tuple(range(first, layers))]
    if len(set(formulas)) > 1:
        raise _refuse("moe_layer_freq and decoder_sparse_step disagree: the router layout is ambiguous")
    if not formulas[0]:
        raise _refuse("no layer has a router")
    return RouterLayout(formulas[0], experts, top_k)


def check_agreement(declared: RouterLayout, derived: RouterLayout) -> None:
    """The model's own word and its config must say the same."""
    if declared != derived:
        raise _refuse(
            f"the model declares {declared.num_routers} routers ({declared.num_experts} experts, top {declared.top_k}) and "
            f"its config {derived.num_routers} ({derived.num_experts}, top {derived.top_k})"
        )


def _value(configs: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Any:
    found = [config[name] for config in configs for name in names if config.get(name) is not None]
    for other in found[1:]:
        if type(other) is not type(found[0]) or other != found[0]:
            raise _refuse(f"{' and '.join(names)} disagree: {str(found[0])[:40]} and {str(other)[:40]}")
    return found[0] if found else None


def _positive(configs: Sequence[Mapping[str, Any]], names: Sequence[str], high: int = 2**31) -> int:
    value = _value(configs, names)
    if value is None:
        raise _refuse(f"none of {', '.join(names)} is stated")
    return _integer(value, names[0], 1, high)


def _integer(value: Any, name: str, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _refuse(f"{name}={str(value)[:40]} is not an integer from {low} to {high}")
    return value


def _refuse(reason: str) -> ConfigError:
    return ConfigError(f"the router layout cannot be determined: {reason}; turn route capture off for this model")
