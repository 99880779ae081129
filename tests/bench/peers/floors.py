"""What a piece of work must cost on this machine: bytes over a plain read, operations over the register peak. Pure arithmetic.

A floor counts the weights as the engine holds them, once a step, the keys and values attention reads, and nothing else.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .timing import Workload

KV_ELEMENT = 2
"""Bytes: keys and values in bf16."""


@dataclass(frozen=True)
class Shape:
    """The sizes that count, from a config.json of the llama family or of one with experts in every layer."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Of one expert, where there are experts."""
    vocabulary: int
    experts: int = 0
    chosen: int = 0
    """Experts per token."""

    @classmethod
    def read(cls, path: Path) -> Shape:
        config: dict[str, Any] = json.loads(path.read_text("utf-8"))
        heads = config["num_attention_heads"]
        experts = config.get("num_experts") or config.get("num_local_experts") or 0
        return cls(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate=config["moe_intermediate_size" if experts else "intermediate_size"],
            vocabulary=config["vocab_size"],
            experts=experts,
            chosen=config["num_experts_per_tok"] if experts else 0,
        )

    @property
    def layer_weights(self) -> int:
        """Of all linear layers but the head, as one token meets them."""
        return self._layer_weights(self.chosen or 1)

    def _layer_weights(self, experts: float) -> int:
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return int(self.layers * (attention + self.hidden * (3 * self.intermediate * experts + self.experts)))

    def share_read(self, tokens: int) -> float:
        """Of all weights, in a step of so many tokens: only experts that one of them has chosen are read, whichever these are."""
        if not self.experts:
            return 1.0
        touched = self.experts * (1 - (1 - self.chosen / self.experts) ** tokens)
        whole = self._layer_weights(self.experts) + self.head_weights
        return (self._layer_weights(touched) + self.head_weights) / whole

    @property
    def head_weights(self) -> int:
        return self.hidden * self.vocabulary

    @property
    def kv_bytes(self) -> int:
        """Per position, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * KV_ELEMENT

    def attention_ops(self, positions: float, context: float) -> float:
        """Scores and weighted sums of `positions` queries that see `context` keys each."""
        return 4.0 * self.layers * self.heads * self.head_dim * positions * context


@dataclass(frozen=True)
class Rates:
    """G operations per second of this machine's registers; None: not measured here."""

    linear: float | None
    """In the arithmetic the weights allow: bf16 dot for 16 bits, int8 dot below."""
    attention: float | None


@dataclass(frozen=True)
class Cost:
    """Of one step, or of a whole piece of work."""

    nbytes: float
    linear_ops: float
    attention_ops: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.nbytes + other.nbytes, self.linear_ops + other.linear_ops, self.attention_ops + other.attention_ops
        )

    def times(self, count: float) -> Cost:
        return Cost(self.nbytes * count, self.linear_ops * count, self.attention_ops * count)

    def memory_seconds(self, gigabytes: float) -> float:
        return self.nbytes / gigabytes / 1e9

    def compute_seconds(self, rates: Rates) -> float:
        if not rates.linear or not rates.attention:
            return 0.0
        return self.linear_ops / rates.linear / 1e9 + self.attention_ops / rates.attention / 1e9


def floor_seconds(steps: list[Cost], gigabytes: float, rates: Rates) -> float:
    """Each step is bound by memory or by arithmetic, whichever takes longer; reading and computing overlap at best."""
    return sum(max(step.memory_seconds(gigabytes), step.compute_seconds(rates)) for step in steps)


def decode_step(shape: Shape, weights: float, batch: int, context: float) -> Cost:
    """One token for each of `batch` requests that hold `context` positions."""
    linear = 2.0 * batch * (shape.layer_weights + shape.head_weights)
    nbytes = weights * shape.share_read(batch) + batch * context * shape.kv_bytes
    return Cost(nbytes, linear, shape.attention_ops(batch, context))


def prefill(shape: Shape, weights: float, tokens: int, before: int = 0, prompts: int = 1) -> Cost:
    """`prompts` prompts of `tokens` new positions behind `before` cached ones, in one pass, one row of logits each."""
    linear = 2.0 * prompts * (tokens * shape.layer_weights + shape.head_weights)
    nbytes = weights * shape.share_read(prompts * tokens) + prompts * (before + tokens) * shape.kv_bytes
    return Cost(nbytes, linear, shape.attention_ops(prompts * tokens, before + (tokens + 1) / 2))


def steps_of(work_name: str, work: Workload, shape: Shape, weights: float) -> list[Cost]:
    """The steps behind one sample of `work_name`. Raises `KeyError` for work that has no floor."""
    if work_name.startswith("decode_"):
        batch = int(work_name.removeprefix("decode_"))
        return [decode_step(shape, weights, batch, work.prompt + (work.output + 1) / 2)]
    if work_name == "prefill":
        return [prefill(shape, weights, work.prefill)]
    shared = prefill(shape, weights, work.shared)
    own = prefill(
        shape, 0.0, work.own, work.shared, work.sharing
    )  # beside the shared part or after it: weights read once
    first = [shared + own]
    if work_name == "prefix_first_s":
        return first
    if work_name == "prefix_wall_s":
        context = work.shared + work.own + work.shared_output / 2
        step = decode_step(shape, weights, work.sharing, context)
        return first + [step] * (work.shared_output - 1)
    raise KeyError(work_name)


def best_value(work_name: str, work: Workload, seconds: float) -> float:
    """The floor in the unit of the samples: tokens per second, or seconds where the work is told in them."""
    if work_name.startswith("decode_"):
        return int(work_name.removeprefix("decode_")) / seconds
    return work.prefill / seconds if work_name == "prefill" else seconds


def served_positions(work: Workload) -> int:
    """Positions whose keys were written before the peak of memory is read: first token, prefill and decode."""
    positions = 17 + (work.repeats + 1) * (work.prefill + 1)
    for batch in work.batches:
        repeats = work.repeats if batch < 32 else max(1, work.repeats - 1)
        positions += batch * (work.prompt + 2 + repeats * (2 * work.prompt + work.output + 1))
    return positions
