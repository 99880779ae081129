"""A sparse feed-forward block: a router, its experts as two stacked weights, and optionally an expert for every token.

Called on the worker thread; owns router and expert weights, never the tap that a router writes its choice to.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from infer.config.model import RoutedLayer
from infer.errors import ModelError, UnsupportedModelError
from infer.layers.mlp import MLP
from infer.layers.parameter import Layer, Parameter
from infer.plugins.platform import ExpertStack, Routing

if TYPE_CHECKING:
    from infer.layers.facts import Facts
    from infer.plugins.model import BuildContext


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEFacts:
    """Shape and routing rule of a sparse block."""

    hidden_size: int
    intermediate_size: int
    """Of one expert."""
    num_experts: int
    routing: Routing
    router_fp32: bool = False
    """The router's weight and its product are fp32 whatever the compute dtype (DeepSeek)."""
    score_bias: bool = False
    """A correction bias per expert takes part in the choice (DeepSeek-V3)."""


class SparseMoE(Layer):
    """sum of weight_k * expert_k(x), plus the shared expert where there is one. Parameters: "router" [E, N];
    "gate_up" [E * 2I, N], for each expert gate rows then up rows; "down" [E * N, I]; "score_bias" [E];
    "shared_gate" [1, N], whose sigmoid scales the shared expert (Qwen2-MoE)."""

    def __init__(
        self,
        context: BuildContext,
        layer_id: int,
        facts: MoEFacts,
        *,
        shared: MLP | None = None,
        shared_gate: bool = False,
    ) -> None:
        ops = context.ops
        if ops.topk_router is None or ops.moe is None:
            raise UnsupportedModelError(
                "this platform has no operations for mixture-of-experts layers (topk_router, moe); "
                "choose another platform, for example 'reference'"
            )
        self.ops, self.route, self.experts = ops, ops.topk_router, ops.moe
        self.facts = facts
        self.routed = RoutedLayer(layer_id=layer_id, num_experts=facts.num_experts, top_k=facts.routing.top_k)
        self.route_tap: Tensor | None = None
        """[max tokens of a step, K], any integer dtype: when set, every forward pass writes the choice to its first rows."""
        count, hidden, size = facts.num_experts, facts.hidden_size, facts.intermediate_size

        def slot(*shape: int, dtype: torch.dtype = context.dtype, unit: int | None = None) -> Parameter:
            data = torch.empty(*shape, dtype=dtype, device=context.device)
            return Parameter(data, role=None if unit is None else "experts", unit=unit)

        self.router = slot(count, hidden, dtype=torch.float32 if facts.router_fp32 else context.dtype)
        self.score_bias = slot(count, dtype=torch.float32) if facts.score_bias else None
        self.gate_up = slot(count * 2 * size, hidden, unit=2 * size)
        self.down = slot(count * hidden, size, unit=hidden)
        self.shared = shared
        self.shared_gate = slot(1, hidden) if shared_gate else None

    def finalize(self) -> None:
        """Experts in the platform's order from here on."""
        self.gate_up.pack(self.ops)
        self.down.pack(self.ops)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, N] -> [T, N]."""
        ops, shared = self.ops, self.shared
        if shared is None:
            return self._routed(x)
        if ops.beside is None:
            out, common = self._routed(x), shared(x)
        else:
            out, common = ops.beside(len(x), lambda: self._routed(x), lambda: shared(x))
        gate = None if self.shared_gate is None else ops.linear(x, self.shared_gate.data, None)
        if ops.add_shared is not None:
            return ops.add_shared(out, common, gate)
        if gate is not None:
            common = common * (ops.sigmoid or torch.sigmoid)(gate)
        return out + common

    def _routed(self, x: Tensor) -> Tensor:
        """The experts that the router chooses, [T, N]."""
        ops, facts = self.ops, self.facts
        wide = x
        if facts.router_fp32:
            wide = x.float() if ops.widen is None else ops.widen(x)
        logits = ops.linear(wide, self.router.data, None)
        bias = None if self.score_bias is None else self.score_bias.data
        weights, ids = self.route(logits, facts.routing, bias, self.route_tap)
        return self._chosen(x, ids, weights)

    def _chosen(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The chosen experts of each token, weighted."""
        gate_up, down, blocks = self.gate_up, self.down, self.ops.blocks
        if blocks is not None and blocks.moe is not None and (gate_up.blocks or down.blocks):
            stacks = (ExpertStack(slot.data, slot.blocks) for slot in (gate_up, down))
            return blocks.moe(x, ids, weights, *stacks)
        return self.experts(x, ids, weights, _stacked(gate_up), _stacked(down))


def _stacked(slot: Parameter) -> Tensor:
    """[E, rows, columns], or as it was packed."""
    if slot.data.shape != slot.shape:
        return slot.data
    return slot.data.view(-1, slot.unit, slot.shape[1])


def read_moe(facts: Facts, *, size_key: str, num_experts: int, top_k: int, renormalize: bool) -> MoEFacts:
    """The facts of softmax-routed experts; the numbers are transformers' defaults for the architecture."""
    # transformers renamed the key; both spellings are in circulation for every architecture.
    key = "num_local_experts" if facts.raw.get("num_experts") is None else "num_experts"
    experts = facts.integer(key, num_experts)
    chosen = facts.integer("num_experts_per_tok", top_k)
    if chosen > experts:
        raise ModelError(
            f"{facts.architecture}: num_experts_per_tok={chosen} in config.json is more than {key}={experts}"
        )
    return MoEFacts(
        hidden_size=facts.integer("hidden_size"),
        intermediate_size=facts.integer(size_key),
        num_experts=experts,
        routing=Routing(top_k=chosen, renormalize=renormalize),
    )


def read_grouped_moe(facts: Facts, *, num_experts: int, top_k: int | None, size: int, rule: Routing) -> MoEFacts:
    """The facts of DeepSeek's routed experts; `rule` says all but their numbers, which must fit its groups."""
    experts = facts.integer("n_routed_experts", num_experts)
    chosen = facts.integer("num_experts_per_tok") if top_k is None else facts.integer("num_experts_per_tok", top_k)
    groups, best = rule.num_groups, rule.top_groups
    least = 2 if rule.group_score == "top2_sum" else 1
    if experts % groups or experts // groups < least or best > groups:
        raise ModelError(
            f"{facts.architecture}: n_routed_experts={experts} in config.json do not form n_group={groups} equal groups "
            f"of at least {least}, of which topk_group={best} are taken"
        )
    if chosen > best * (experts // groups):
        raise ModelError(
            f"{facts.architecture}: num_experts_per_tok={chosen} in config.json is more than the "
            f"{best * (experts // groups)} experts of topk_group={best} groups"
        )
    return MoEFacts(
        hidden_size=facts.integer("hidden_size"),
        intermediate_size=facts.integer("moe_intermediate_size", size),
        num_experts=experts,
        routing=replace(rule, top_k=chosen),
        router_fp32=True,
        score_bias=rule.scoring == "sigmoid",
    )


def sparse_layers(facts: Facts, num_layers: int) -> tuple[bool, ...]:
    """Which layers have experts, from `decoder_sparse_step` and `mlp_only_layers`."""
    step = facts.integer("decoder_sparse_step", 1)
    plain = facts.raw.get("mlp_only_layers") or []
    if not isinstance(plain, list) or not all(isinstance(i, int) and 0 <= i < num_layers for i in plain):
        raise ModelError(
            f"{facts.architecture}: mlp_only_layers={plain!r} in config.json must list layers of 0..{num_layers - 1}"
        )
    return tuple(i not in plain and (i + 1) % step == 0 for i in range(num_layers))
