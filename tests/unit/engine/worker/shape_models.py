"""Two architectures that live only in the tests, and their dense references in plain fp64 torch.

Loaded as an installed plugin through its entry point; the engine knows neither.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from infer.config.model import KVLayout, ModelConfig
from infer.layers.attention import AttentionFacts, SelfAttention, kv_layout
from infer.layers.embedding import Embedding
from infer.layers.linear import LMHead
from infer.layers.mlp import MLP
from infer.layers.norm import RMSNorm
from infer.layers.parameter import Layer
from infer.layers.rotary import RopeFacts, Rotary
from infer.plugins.hookspecs import hookimpl
from infer.plugins.model import API_VERSION, BuildContext, ForwardBatch, ModelSpec
from infer.weights.mapping import WeightTable

HIDDEN, INNER, EPS, THETA = 24, 32, 1e-5, 10000.0
HEADS = ((4, 1, 8), (2, 2, 12), (3, 3, 4))
"""Query heads, key/value heads and head size per layer: no two alike."""
Weights = dict[str, Tensor]


class MixedHeads(Layer):
    """Attention layers of different head counts and sizes, no MLP."""

    def __init__(self, config: ModelConfig, context: BuildContext) -> None:
        facts = [
            AttentionFacts(hidden_size=HIDDEN, num_heads=h, num_kv_heads=k, head_size=d, scale=d**-0.5)
            for h, k, d in HEADS
        ]
        self.embedding = Embedding(context, config.vocab_size, HIDDEN)
        self.norms = [RMSNorm(context, HIDDEN, EPS) for _ in facts]
        self.attentions = [SelfAttention(context, i, f) for i, f in enumerate(facts)]
        self.rotaries = [Rotary(context, RopeFacts(theta=THETA), f.head_size) for f in facts]
        self.norm = RMSNorm(context, HIDDEN, EPS)
        self.head = LMHead(context, config.vocab_size, HIDDEN)
        self.table = WeightTable()
        self.table.add("embed", "embedding.weight")
        self.table.add("norm", "norm.weight")
        self.table.add("head", "head.weight")
        for i, f in enumerate(facts):
            self.table.add(f"{i}.norm", f"norms.{i}.weight")
            shards = [(f"{i}.q", f.q_rows), (f"{i}.k", f.kv_rows), (f"{i}.v", f.kv_rows)]
            self.table.add_shards(f"attentions.{i}.qkv.weight", shards)
            self.table.add(f"{i}.o", f"attentions.{i}.out.weight")

    def forward(self, batch: ForwardBatch) -> Tensor:
        x = self.embedding(batch.token_ids)
        for norm, attention, rotary in zip(self.norms, self.attentions, self.rotaries, strict=True):
            x = x + attention(norm(x), rotary(batch.positions), batch)
        return self.norm(x)

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        return self.head(hidden[rows])

    def kv_layout(self) -> KVLayout:
        return kv_layout([attention.facts for attention in self.attentions])

    def weight_table(self) -> WeightTable:
        return self.table


class NoAttention(Layer):
    """A bigram model: every position sees itself only, and there is no KV cache at all."""

    def __init__(self, config: ModelConfig, context: BuildContext) -> None:
        self.embedding = Embedding(context, config.vocab_size, HIDDEN)
        self.mlps = [MLP(context, HIDDEN, INNER) for _ in range(2)]
        self.head = LMHead(context, config.vocab_size, HIDDEN)
        self.table = WeightTable()
        self.table.add("embed", "embedding.weight")
        self.table.add("head", "head.weight")
        for i in range(2):
            self.table.add_shards(f"mlps.{i}.gate_up.weight", [(f"{i}.gate", INNER), (f"{i}.up", INNER)])
            self.table.add(f"{i}.down", f"mlps.{i}.down.weight")

    def forward(self, batch: ForwardBatch) -> Tensor:
        x = self.embedding(batch.token_ids)
        for mlp in self.mlps:
            x = x + mlp(x)
        return x

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        return self.head(hidden[rows])

    def kv_layout(self) -> KVLayout:
        return KVLayout(groups=(), layers=())

    def weight_table(self) -> WeightTable:
        return self.table


def config_view(config: ModelConfig) -> ModelConfig:
    return config


def mixed_heads_weights(vocab: int) -> Weights:
    shapes = {"embed": (vocab, HIDDEN), "norm": (HIDDEN,), "head": (vocab, HIDDEN)}
    for i, (h, k, d) in enumerate(HEADS):
        shapes |= {f"{i}.norm": (HIDDEN,), f"{i}.q": (h * d, HIDDEN), f"{i}.k": (k * d, HIDDEN)}
        shapes |= {f"{i}.v": (k * d, HIDDEN), f"{i}.o": (HIDDEN, h * d)}
    return draw(shapes)


def no_attention_weights(vocab: int) -> Weights:
    shapes = {"embed": (vocab, HIDDEN), "head": (vocab, HIDDEN)}
    for i in range(2):
        shapes |= {f"{i}.gate": (INNER, HIDDEN), f"{i}.up": (INNER, HIDDEN), f"{i}.down": (HIDDEN, INNER)}
    return draw(shapes)


def draw(shapes: dict[str, tuple[int, ...]]) -> Weights:
    generator = torch.Generator().manual_seed(11)
    return {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}


def dense_mixed_heads(weights: Weights, ids: list[int]) -> Tensor:
    """-> fp64 logits [len, vocab]."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    x = w["embed"][ids]
    for i, (h, k, d) in enumerate(HEADS):
        y = dense_norm(x, w[f"{i}.norm"])
        q, key, v = (y @ w[f"{i}.{part}"].T for part in "qkv")
        q, key = rotate(q.view(-1, h, d)), rotate(key.view(-1, k, d))
        out = []
        for head in range(h):
            kv = head * k // h
            scores = (q[:, head] @ key[:, kv].T) / d**0.5
            scores = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, -torch.inf)
            out.append(scores.softmax(-1) @ v.view(-1, k, d)[:, kv])
        x = x + torch.cat(out, dim=-1) @ w[f"{i}.o"].T
    return dense_norm(x, w["norm"]) @ w["head"].T


def dense_no_attention(weights: Weights, ids: list[int]) -> Tensor:
    w = {name: tensor.double() for name, tensor in weights.items()}
    x = w["embed"][ids]
    for i in range(2):
        x = x + (F.silu(x @ w[f"{i}.gate"].T) * (x @ w[f"{i}.up"].T)) @ w[f"{i}.down"].T
    return x @ w["head"].T


def dense_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def rotate(x: Tensor) -> Tensor:
    """[len, heads, d], position = row."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x)).double()[:, None] / THETA ** (torch.arange(half).double() / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def example(architecture: str) -> dict[str, Any]:
    return {"architectures": [architecture], "vocab_size": 50, "max_position_embeddings": 64, "dtype": "float32"}


@hookimpl
def infer_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name=name,
            api=API_VERSION,
            factory=f"{__name__}:{factory}",
            architectures=(architecture,),
            config_view=f"{__name__}:config_view",
            example=example(architecture),
        )
        for name, factory, architecture in (
            ("mixed-heads", "MixedHeads", "MixedHeadsForCausalLM"),
            ("no-attention", "NoAttention", "NoAttentionForCausalLM"),
        )
    ]
