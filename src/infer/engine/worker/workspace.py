"""The memory of the worst step, found by running a model on shapes: with ops that allocate and compute nothing.

Runs while planning, on the thread that builds the worker; owns nothing. See docs/decisions/004-workspace.md.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from infer.config.model import KVLayout, StepBounds
from infer.engine.sampling.sampler import prompt_rows, workspace_bytes
from infer.plugins.model import CausalLM, ForwardBatch
from infer.plugins.platform import UNSCALED, AttentionMetadata, Ops, Routing

PlanningOps = tuple[Ops, Callable[[], int]]
"""As `SupportsWorkspace.planning_ops` gives them."""
BLOCK_SIZE = 16
"""Of the block tables that are traced; the real one changes their width, which does not count."""
Row = tuple[int, int]
"""Tokens in the cache before the step, tokens in the step."""


def trace_worst_step(
    model: CausalLM,
    layout: KVLayout,
    bounds: StepBounds,
    buffer_bytes: Callable[[], int],
    kv_dtype: torch.dtype,
    vocab_size: int,
    *,
    recorded: bool = False,
) -> int:
    """Most bytes that a step takes, in the platform's buffer and outside of it, with prompt log-probabilities. `recorded`: also
    one token in every row at the longest context, which is what is recorded for all (`SupportsGraphSizes`); kernels may
    compute that in another way than rows of several, parts of the context side by side."""
    outside = 0
    most = min(bounds.num_rows, bounds.num_tokens)
    steps = worst_steps(bounds) + ([[(bounds.max_model_len - 1, 1)] * most] if recorded else [])
    for rows in steps:
        live, batch = LiveBytes(), [_batch(rows, layout, kv_dtype)]
        with torch.no_grad(), live:
            hidden = model.forward(batch.pop())  # what ops keep in the batch ends with the forward pass
            num_logits = min(len(hidden), max(len(rows), prompt_rows(vocab_size)))
            logits = model.logits(hidden, torch.arange(num_logits))
            outside = max(outside, live.peak)
            del hidden, logits
    # The sampler, or as much for log-probabilities of prompt positions; by then the small tensors of the forward pass
    # are gone, but seldom from malloc's heap.
    return buffer_bytes() + outside + workspace_bytes(vocab_size)


def worst_steps(bounds: StepBounds) -> list[list[Row]]:
    """Steps of which one takes the most memory: as many tokens as there can be, at the end of sequences as long as there
    can be; in as few rows as possible, and in as many as possible."""
    most = min(bounds.num_rows, bounds.num_tokens)
    longest = max(1, bounds.max_model_len - 1)  # behind at least one cached token: a chunk that needs a mask

    def step(num_rows: int) -> list[Row]:
        num_long = 1
        while num_long < num_rows and bounds.num_tokens - (num_rows - num_long) > num_long * longest:
            num_long += 1
        tokens = min(bounds.num_tokens - (num_rows - num_long), num_long * longest)
        counts = [1] * (num_rows - num_long) + [min(longest, tokens - i * longest) for i in range(num_long)]
        return [(bounds.max_model_len - count, count) for count in sorted(counts, key=lambda count: count != 1)]

    fewest = min(most, -(-bounds.num_tokens // longest))
    return [step(fewest), step(most)]


def slot_bytes(bounds: StepBounds, num_groups: int) -> int:
    """Of the persistent batch: token ids, and a block table per KV group."""
    blocks = -(-bounds.max_model_len // BLOCK_SIZE)
    return bounds.num_rows * torch.int32.itemsize * (bounds.max_model_len + num_groups * blocks)


def shape_ops() -> PlanningOps:
    """For a platform without planning ops: every op reduced to the shape and dtype of its result, as
    `plugins.platform.Ops` documents them."""

    def halves(x: Tensor) -> Tensor:
        return x.new_empty(x.shape[0], x.shape[1] // 2)

    def route(logits: Tensor, rule: Routing, bias: Tensor | None, tap: Tensor | None) -> tuple[Tensor, Tensor]:
        shape = logits.shape[0], rule.top_k
        return torch.empty(shape), torch.zeros(shape, dtype=torch.int64)

    def experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        # At worst all tokens choose one expert while the outputs of all K choices are kept for their sum.
        kept, inner = x.new_empty(*ids.shape, x.shape[1]), x.new_empty(x.shape[0], gate_up.shape[1])
        halved = halves(inner)
        del inner, halved
        return torch.empty(x.shape, dtype=torch.float32).to(kept.dtype)

    ops = Ops(
        embedding=lambda ids, weight: torch.empty(ids.shape[0], weight.shape[1], dtype=weight.dtype),
        linear=lambda x, weight, bias: x.new_empty(x.shape[0], weight.shape[0]),
        rms_norm=lambda x, weight, eps: torch.empty_like(x),
        rotary=lambda q, k, cos, sin: (torch.empty_like(q), torch.empty_like(k)),
        silu_and_mul=halves,
        gelu_tanh_and_mul=halves,
        write_kv=lambda k, v, k_cache, v_cache, slot_mapping, scales=UNSCALED: None,
        attention=lambda q, k_cache, v_cache, metadata, scale, window, softcap, scales=UNSCALED: q.new_empty(
            *q.shape[:2], v_cache.shape[-1]
        ),
        gather_rows=lambda x, rows: x.new_empty(rows.shape[0], x.shape[1]),
        topk_router=route,
        moe=experts,
    )
    return ops, lambda: 0


class LiveBytes(TorchFunctionMode):
    """Follows the bytes of the tensors that functions make, and their peak. Tensors from outside do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for item in tree_leaves((args, kwargs)):
            if isinstance(item, Tensor):
                self._follow(item, 0)
        out = func(*args, **(kwargs or {}))
        for item in tree_leaves(out):
            if isinstance(item, Tensor):
                self._follow(item, item.untyped_storage().nbytes())
        return out

    def _follow(self, tensor: Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def _batch(rows: list[Row], layout: KVLayout, kv_dtype: torch.dtype) -> ForwardBatch:
    """A step's input; the cache has a shape but no storage."""
    counts = [count for _, count in rows]
    lengths = [before + count for before, count in rows]
    num_tokens, num_blocks = sum(counts), -(-max(lengths) // BLOCK_SIZE)
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    metadata = [
        AttentionMetadata(
            query_starts=starts,
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            block_table=torch.zeros(len(rows), num_blocks, dtype=torch.int32),
            slot_mapping=torch.zeros(num_tokens, dtype=torch.int64),
            query_lens_host=counts,
            seq_lens_host=lengths,
            num_decode_rows=counts.count(1),
        )
        for _ in layout.groups
    ]
    kv = {}
    for layer in layout.layers:
        shape = (num_blocks, BLOCK_SIZE, layer.num_kv_heads)
        keys, values = (torch.empty(*shape, size, dtype=kv_dtype, device="meta") for size in layer.head_sizes)
        kv[layer.layer_id] = (keys, values)
    return ForwardBatch(
        token_ids=torch.zeros(num_tokens, dtype=torch.int64),
        positions=torch.arange(num_tokens),
        attention=tuple(metadata),
        kv=kv,
        group_of_layer={layer: g for g, group in enumerate(layout.groups) for layer in group.layer_ids},
    )
